"""Windows into rows of one fixed length."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Which windows lie in which row."""

    order: np.ndarray
    """(n,) int64: window numbers, row after row."""

    row_ends: np.ndarray
    """(rows,) int64: row r holds windows order[row_ends[r - 1] : row_ends[r]]."""

    @property
    def num_rows(self) -> int:
        return len(self.row_ends)

    def windows_of(self, row: int) -> np.ndarray:
        """Window numbers of a row."""
        start = self.row_ends[row - 1] if row else 0
        return self.order[start : self.row_ends[row]]


def pack(lengths: np.ndarray, capacity: int) -> PackedRows:
    """Best-fit decreasing: from the longest window to the shortest, each goes into the fullest row that has room.

    Deterministic: windows of equal length keep their order.

    Args:
        lengths: (n,) integers from 1 to `capacity`.
        capacity: positions of a row.
    """
    rows_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit c is set while a row with c free positions exists, so that the best fit is one shift and one lowest bit.
    rooms = 0
    row_of = np.empty(len(lengths), np.int64)
    num_rows = 0
    for window in np.argsort(-lengths.astype(np.int64), kind="stable").tolist():
        length = int(lengths[window])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, num_rows
            num_rows += 1
        row_of[window] = row
        left = room - length
        if left:
            rows_with_room[left].append(row)
            rooms |= 1 << left
    return PackedRows(
        order=np.argsort(row_of, kind="stable"),
        row_ends=np.cumsum(np.bincount(row_of, minlength=num_rows)),
    )
