"""Held-out conversations, scored whole: `val/loss` and `val/perplexity`."""

import hashlib
import json

import numpy as np

from models.batch import IGNORE_INDEX
from trainer.data.row import Rows, RowSource
from trainer.errors import RunError
from trainer.validation.task import Filled, padding_rows, perplexity

_EPOCH = 0
"""Every round reads the rows of this one: all samples once, always in the same rows."""


class ChatTask:
    """All rows of a source; each is a piece. See Task for the methods."""

    name = "val.data"
    greedy = False
    text_ids = None

    def __init__(self, source: RowSource, *, rows_per_forward: int) -> None:
        self._source = source
        self.seq_len = source.seq_len
        self.rows_per_forward = rows_per_forward
        self.num_pieces = source.num_rows

    @property
    def costs(self) -> np.ndarray:
        """All alike: what a row holds is known when it is read."""
        return np.zeros(self._source.num_rows)

    @property
    def notes(self) -> list[str]:
        return []

    @property
    def content(self) -> str:
        return self._source.description

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self._source.fingerprint, sort_keys=True).encode()).hexdigest()

    def fill(self, rows: np.ndarray) -> Filled:
        out = padding_rows(len(rows), self.seq_len)
        slots = np.flatnonzero(rows >= 0)
        if slots.size:
            filled = Rows.empty(slots.size, self.seq_len)
            self._source.fill(_EPOCH, rows[slots], filled)
            out.input_ids[slots] = filled.input_ids
            out.labels[slots] = filled.labels
            out.num_padding[slots] = filled.num_padding
            for slot, lengths in zip(slots.tolist(), filled.segment_lengths, strict=True):
                out.segment_lengths[slot] = lengths
        lengths = np.concatenate(out.segment_lengths)
        starts = np.cumsum(lengths) - lengths
        scored = np.add.reduceat((out.labels != IGNORE_INDEX).ravel(), starts, dtype=np.int64)
        pieces = np.repeat(rows, [len(lengths) for lengths in out.segment_lengths])
        return Filled(rows=out, pieces=pieces, counts=np.stack([scored, np.zeros_like(scored)], axis=1))

    def metrics(self, results: np.ndarray) -> dict[str, float]:
        nats, _, _, tokens, _ = results.sum(axis=0).tolist()
        if not tokens:
            raise RunError("the conversations of val.data have no token that carries loss")
        loss = nats / tokens
        return {"val/loss": loss, "val/perplexity": perplexity(loss)}
