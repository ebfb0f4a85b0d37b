"""What a round of validation scores: tasks. Each says what its rows are and what the results of their pieces mean; the
deal of rows to passes and ranks, the forward passes and the one reduction are the same for all.

A *piece* is what results are kept for: a window of a held-out set, a row of conversations.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from models.batch import IGNORE_INDEX
from trainer.data.row import Rows

_PADDING_ID = 0

NUM_RESULTS = 5
"""Of a piece: nats, nats of text, hits (these three from the device), scored tokens, their bytes (from the host)."""


@dataclass(frozen=True, kw_only=True)
class Filled:
    """The rows of a forward pass."""

    rows: Rows

    pieces: np.ndarray
    """(segments,) int64, for every segment of every row in order: its piece; -1 for padding."""

    counts: np.ndarray
    """(segments, 2) int64: scored tokens, and UTF-8 bytes that they spell."""


class Task(Protocol):
    """Rows of one shape, scored whole by every round."""

    @property
    def name(self) -> str:
        """What the log calls it."""
        ...

    @property
    def seq_len(self) -> int: ...

    @property
    def rows_per_forward(self) -> int:
        """Rows of a forward pass: the same for all of them, so that one graph serves the task."""
        ...

    @property
    def costs(self) -> np.ndarray:
        """(rows,) float64: what a row costs beyond what all rows of its length cost, in pairs of attention."""
        ...

    @property
    def num_pieces(self) -> int: ...

    @property
    def greedy(self) -> bool:
        """Its metrics want hits: where the most likely token was the label."""
        ...

    @property
    def text_ids(self) -> Tensor | None:
        """(vocab_size,) bool on the model's device: ids that spell text. None where text is not told from the rest."""
        ...

    @property
    def notes(self) -> list[str]:
        """What to tell the user once about the data."""
        ...

    @property
    def content(self) -> str:
        """What it holds, for the log."""
        ...

    @property
    def digest(self) -> str:
        """Of its rows: ranks that have the same score the same."""
        ...

    def fill(self, rows: np.ndarray) -> Filled:
        """Read rows; called by a thread of its own.

        Args:
            rows: (rows_per_forward,) int64 numbers of rows; -1 for a row of padding.

        Raises:
            RunError: a row cannot be read.
        """
        ...

    def metrics(self, results: np.ndarray) -> dict[str, float]:
        """What the results of all pieces of all ranks say, by full names.

        Args:
            results: (num_pieces, NUM_RESULTS) float64.

        Raises:
            RunError: nothing was scored.
        """
        ...


def padding_rows(count: int, seq_len: int) -> Rows:
    """Rows that hold nothing."""
    return Rows(
        input_ids=np.full((count, seq_len), _PADDING_ID, np.int64),
        labels=np.full((count, seq_len), IGNORE_INDEX, np.int64),
        segment_lengths=[np.array([seq_len], np.int64)] * count,
        num_padding=np.full(count, seq_len, np.int64),
    )


def perplexity(loss: float) -> float:
    """exp of nats per token. It overflows above 709, where infinity is the honest answer."""
    return math.exp(loss) if loss < 700 else loss * math.inf
