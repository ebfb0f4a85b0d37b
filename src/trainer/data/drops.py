"""Rows that something is said of: how many, and where the first of them is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Rows that gave nothing, or samples that were cut."""

    count: int

    first_place: str
    """Where the first of them is."""

    @property
    def where(self) -> str:
        return f"first: {self.first_place}" if self.count > 1 else self.first_place

    def text(self, what: str) -> str:
        """`3 no messages (first: a.jsonl, line 4)`."""
        return f"{self.count:,} {what} ({self.where})"


class DropCounts:
    """Added up by reason, while rows are read in their order."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, int]] = {}
        """How many rows, and the first of them."""

    def add(self, rows: Iterable[tuple[int, str]]) -> None:
        """Numbers of rows, and the reasons."""
        for row, reason in rows:
            count, first = self._found.get(reason, (0, row))
            self._found[reason] = (count + 1, first)

    def drops(self, place: Callable[[int], str]) -> dict[str, Drop]:
        """By reason. `place`: says where a row is."""
        return {reason: Drop(count=count, first_place=place(first)) for reason, (count, first) in self._found.items()}
