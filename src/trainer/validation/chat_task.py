"""Held-out conversations, scored whole: `val/loss` and `val/perplexity`."""

import numpy as np
import torch
from torch import Tensor

from models.batch import IGNORE_INDEX
from trainer.data.row import Rows, RowSource
from trainer.errors import RunError
from trainer.validation.task import padding_rows, perplexity

_EPOCH = 0
"""Every round reads the rows of this one: all samples once, always in the same rows."""


class ChatTask:
    """All rows of a source. See Task for the methods."""

    name = "val.data"
    num_sums = 2
    """Nats and number of the loss tokens."""

    def __init__(self, source: RowSource, *, rows_per_forward: int) -> None:
        self._source = source
        self.seq_len = source.seq_len
        self.num_rows = source.num_rows
        self.rows_per_forward = rows_per_forward

    @property
    def notes(self) -> list[str]:
        return []

    @property
    def content(self) -> str:
        return self._source.description

    def fill(self, first: int) -> Rows:
        out = padding_rows(self.rows_per_forward, self.seq_len)
        indices = np.arange(first, min(first + self.rows_per_forward, self.num_rows))
        if not indices.size:
            return out
        filled = Rows.empty(indices.size, self.seq_len)
        self._source.fill(_EPOCH, indices, filled)
        out.input_ids[: indices.size] = filled.input_ids
        out.labels[: indices.size] = filled.labels
        out.segment_lengths[: indices.size] = filled.segment_lengths
        out.num_padding[: indices.size] = filled.num_padding
        return out

    def sums(self, nats: Tensor, labels: Tensor) -> Tensor:
        return torch.stack([nats.sum(), (labels != IGNORE_INDEX).sum()])

    def metrics(self, sums: list[float]) -> dict[str, float]:
        nats, tokens = sums
        if not tokens:
            raise RunError("the conversations of val.data have no token that carries loss")
        loss = nats / tokens
        return {"val/loss": loss, "val/perplexity": perplexity(loss)}
