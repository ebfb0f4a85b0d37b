"""What a round of validation scores: tasks. Each says what its rows are, what to add up over them, and what the sums
mean; the forward passes, the deal of rows to ranks and the one reduction are the same for all.
"""

import math
from typing import Protocol

import numpy as np
from torch import Tensor

from models.batch import IGNORE_INDEX
from trainer.data.row import Rows

_PADDING_ID = 0


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
    def num_rows(self) -> int: ...

    @property
    def num_sums(self) -> int:
        """Numbers that `sums` gives."""
        ...

    @property
    def notes(self) -> list[str]:
        """What a reader of the metrics should know, one sentence each."""
        ...

    @property
    def content(self) -> str:
        """What the rows hold, in a few words."""
        ...

    def fill(self, first: int) -> Rows:
        """`rows_per_forward` rows from row `first` on; those past the last one are padding.

        Raises:
            RunError: a row cannot be read, or holds ids that the model has no embedding for.
        """
        ...

    def sums(self, nats: Tensor, labels: Tensor) -> Tensor:
        """What a forward pass adds up to.

        Args:
            nats: (rows, seq_len) float64; 0 where a label is IGNORE_INDEX.
            labels: (rows, seq_len) int64.

        Returns:
            (num_sums,) float64, on the device of `nats`.
        """
        ...

    def metrics(self, sums: list[float]) -> dict[str, float]:
        """What the sums over all rows of all ranks say.

        Raises:
            RunError: nothing was scored.
        """
        ...


def num_forwards(task: Task, dp_size: int) -> int:
    """Forward passes of every rank: the same on each, so that the collectives inside them match."""
    return -(-task.num_rows // (task.rows_per_forward * dp_size))


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
