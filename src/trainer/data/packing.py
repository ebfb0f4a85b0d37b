"""Pieces of text (samples, windows of documents) into rows of one fixed length."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Which pieces lie in which row, in order. 4 bytes per piece and per row (8 from 2^31 pieces on)."""

    order: np.ndarray
    """(n,) int32: piece numbers, row after row."""

    row_ends: np.ndarray
    """(rows,) int32: row r holds pieces order[row_ends[r - 1] : row_ends[r]], at least one."""

    @property
    def num_rows(self) -> int:
        return len(self.row_ends)

    def pieces_of(self, row: int) -> np.ndarray:
        """Piece numbers of a row, in order."""
        start = self.row_ends[row - 1] if row else 0
        return self.order[start : self.row_ends[row]]


def pack(lengths: np.ndarray, capacity: int) -> PackedRows:
    """Best-fit decreasing: from the longest piece to the shortest, each goes into the fullest row that has room.

    Pieces of one length are placed together: the row that is the best fit for the first of them stays it until it has
    no room for another. So the work is by lengths and free places, not by pieces.

    Deterministic; pieces of equal length keep their order.

    Args:
        lengths: (n,) integers from 1 to `capacity`.
        capacity: positions of a row.
    """
    row_of = np.empty(len(lengths), np.int64)
    rooms = _Rooms(capacity)
    num_rows = 0
    order = by_length(lengths, capacity)
    counts = np.bincount(lengths, minlength=capacity + 1)
    stop = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        start, stop = stop, stop + int(counts[length])
        while start < stop:
            room = rooms.best_fit(length)
            each = (capacity if room is None else room) // length
            needed = -(-(stop - start) // each)
            if room is None:
                room, rows = capacity, np.arange(num_rows, num_rows + needed)
                num_rows += needed
            else:
                rows = rooms.take(room, needed)
            placed = min(len(rows) * each, stop - start)
            row_of[order[start : start + placed]] = np.repeat(rows, each)[:placed]
            start += placed
            in_last = placed - (len(rows) - 1) * each
            rooms.put(rows[:-1], room - each * length)
            rooms.put(rows[-1:], room - in_last * length)
    return PackedRows(
        order=_compact(np.argsort(row_of, kind="stable"), len(lengths)),
        row_ends=_compact(np.cumsum(np.bincount(row_of, minlength=num_rows)), len(lengths)),
    )


class _Rooms:
    """Rows that have room, by their free positions."""

    def __init__(self, capacity: int) -> None:
        self._rows: list[list[np.ndarray]] = [[] for _ in range(capacity)]
        """Rows with i free positions, in blocks of row numbers."""
        self._free = 0
        """Bit i is set while a row with i free positions exists: the best fit is one shift and one lowest bit."""

    def best_fit(self, length: int) -> int | None:
        """Free positions of the fullest row that has room for `length`; None where there is no such row."""
        fitting = self._free >> length
        return length + (fitting & -fitting).bit_length() - 1 if fitting else None

    def take(self, free: int, most: int) -> np.ndarray:
        """Up to `most` rows with `free` positions."""
        blocks = self._rows[free]
        rows = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        self._rows[free] = [rows[most:]] if most < len(rows) else []
        if not self._rows[free]:
            self._free &= ~(1 << free)
        return rows[:most]

    def put(self, rows: np.ndarray, free: int) -> None:
        if len(rows) and free:
            self._rows[free].append(rows)
            self._free |= 1 << free


def pack_in_order(lengths: np.ndarray, capacity: int) -> PackedRows:
    """Each piece into the last row, or into a new one where it does not fit.

    Args:
        lengths: (n,) integers from 1 to `capacity`.
        capacity: positions of a row.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    # The first piece that a row beginning with piece i has no room for.
    next_row = np.searchsorted(ends, starts + capacity, side="right").data
    row_ends, stop = [], 0
    while stop < len(lengths):
        stop = next_row[stop]
        row_ends.append(stop)
    count = len(lengths)
    return PackedRows(order=_compact(np.arange(count), count), row_ends=_compact(np.array(row_ends), count))


def one_each(count: int) -> PackedRows:
    """Every piece a row of its own."""
    return PackedRows(order=_compact(np.arange(count), count), row_ends=_compact(np.arange(1, count + 1), count))


def by_length(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """(n,) int64: piece numbers from the longest to the shortest; equal lengths keep their order."""
    shortness = capacity - lengths
    # 16-bit keys are sorted by radix, ten times as fast.
    return np.argsort(shortness.astype(np.uint16) if capacity < 1 << 16 else shortness, kind="stable")


def _compact(numbers: np.ndarray, most: int) -> np.ndarray:
    return numbers.astype(np.int32 if most < 1 << 31 else np.int64)
