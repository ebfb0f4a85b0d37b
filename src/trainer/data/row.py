"""The row: the one format that every data type gives and everything downstream reads.

A row holds `seq_len` input ids, the labels already shifted (labels[i] is the target of position i), and the lengths of
its segments: documents or samples, in order, summing to `seq_len`. Padding, if any, is the last segment and carries
no loss. A source is a random-access list of rows; it holds no position and no random state, so any thread may fill
any row at any time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trainer.errors import RunError

Track = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""


def untracked(what: str, done: int, total: int) -> None:
    """A Track that tells nobody."""


class RowError(RunError):
    """A row cannot be given: the message names the file (or sample) and the offset."""


@dataclass(kw_only=True)
class Rows:
    """Host buffers of n rows, filled by a source."""

    input_ids: np.ndarray
    """(n, seq_len) int64"""

    labels: np.ndarray
    """(n, seq_len) int64, models.batch.IGNORE_INDEX where no loss"""

    segment_lengths: list[np.ndarray]
    """Per row: int64 lengths of its segments, all positive, summing to seq_len."""

    num_padding: np.ndarray
    """(n,) int64: length of the last segment where that is padding, else 0."""

    @classmethod
    def empty(cls, n: int, seq_len: int) -> "Rows":
        return cls(
            input_ids=np.empty((n, seq_len), np.int64),
            labels=np.empty((n, seq_len), np.int64),
            segment_lengths=[np.empty(0, np.int64)] * n,
            num_padding=np.zeros(n, np.int64),
        )


class RowSource(Protocol):
    """A random-access list of rows, the same number in every epoch."""

    @property
    def num_rows(self) -> int:
        """Rows per epoch."""
        ...

    @property
    def seq_len(self) -> int: ...

    @property
    def full_rows(self) -> bool:
        """Every row is one segment (see models.batch.Segments)."""
        ...

    @property
    def description(self) -> str:
        """One line for the log: what the data holds and what of it an epoch leaves out."""
        ...

    @property
    def fingerprint(self) -> dict[str, Any]:
        """JSON-able identity of the data and its order: a resumed run must find the same."""
        ...

    def fill(self, epoch: int, indices: np.ndarray, out: Rows) -> None:
        """Fill `out` with the rows at these indices (order positions, 0 <= i < num_rows) of `epoch`.

        Raises:
            RowError: the row holds ids that the model has no embedding for.
        """
        ...
