"""Tokenised conversations as a source of rows: cut to the length of a row, mixed, packed, dealt anew every epoch.

A sample of L tokens takes L positions. The label of a position is the token that follows where that one carries loss;
the sample's last position has none, since nothing of the sample follows. Padding is the last segment of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from configs.errors import ConfigError
from models.batch import IGNORE_INDEX
from trainer.data.chat.selection import CachedPart, RowOptions, offsets, select
from trainer.data.row import Rows


@dataclass(frozen=True, kw_only=True)
class RowPiece:
    """A sample, or a stretch of one, in a row."""

    part_number: int
    """Part of the source."""

    sample: int
    """Number in the samples of the part."""

    row: int
    """Row of the part."""

    place: str
    """Where that is, for people."""

    start: int
    """Its first token in the sample."""

    length: int
    """Its tokens."""


class ChatSource:
    """A RowSource over tokenised conversations. It takes 20 bytes of memory per piece."""

    def __init__(self, parts: Sequence[CachedPart], options: RowOptions, *, vocab_size: int, key: str) -> None:
        """Args:
            parts: in the order of the config.
            options: how samples become rows.
            vocab_size: embeddings of the model.
            key: the table of the config that is spoken of, `data` or `val.data`.

        Raises:
            ConfigError: nothing is left to train on, a sample is longer than a row under "error", or holds an id that
                the model has no embedding for.
        """
        _check_ids(parts, vocab_size, key)
        self.parts = parts
        self.seq_len = options.seq_len
        self._options = options
        self._offsets = offsets([part.samples.record.num_samples for part in parts])
        selection = select(parts, options, key=key)
        self._pieces = selection.pieces
        self._plan = selection.plan
        self.num_rows = selection.plan.num_rows
        self.full_rows = bool((self._pieces["length"] == options.seq_len).all())
        self.counts = selection.counts
        """What the data holds and what of it an epoch reads."""

    @property
    def lengths(self) -> np.ndarray:
        """(n,) int64: tokens of all samples of all parts, before any is cut."""
        return np.concatenate([part.samples.lengths for part in self.parts])

    @property
    def description(self) -> str:
        return f"{self.num_rows:,} rows of {self.seq_len} per epoch, {self.counts.text()}"

    @property
    def fingerprint(self) -> dict[str, Any]:
        options = self._options
        shares = options.probabilities or [None] * len(self.parts)
        return {
            "type": "sft",
            "seq_len": options.seq_len,
            "seed": options.seed,
            "shuffle": options.shuffle,
            "packing": options.packing,
            "overflow": options.overflow,
            "stopping_strategy": options.stopping_strategy,
            "padding_id": options.padding_id,
            # Contents, not file names: a run goes on after its data was moved.
            "parts": {
                str(number): {"samples": part.samples.record.digest, "probability": share}
                for number, (part, share) in enumerate(zip(self.parts, shares, strict=True), start=1)
            },
        }

    def fill(self, epoch: int, indices: np.ndarray, out: Rows) -> None:
        numbers, counts = self._plan.pieces(epoch, indices)
        pieces = self._pieces[numbers]
        lengths = pieces["length"].astype(np.int64)
        found = zip(*self._located(pieces), pieces["start"].tolist(), lengths.tolist(), strict=True)
        first = 0
        for row, count in enumerate(counts.tolist()):
            input_ids, labels = out.input_ids[row], out.labels[row]
            segments = lengths[first : first + count]
            first += count
            end = 0
            for _ in range(count):
                part, number, start, length = next(found)
                begin, end = end, end + length
                self._put(part, number, start, input_ids[begin:end], labels[begin:end])
            input_ids[end:] = self._options.padding_id
            labels[end:] = IGNORE_INDEX
            padding = self.seq_len - end
            out.num_padding[row] = padding
            out.segment_lengths[row] = np.append(segments, padding) if padding else segments

    def _put(self, part: int, number: int, start: int, input_ids: np.ndarray, labels: np.ndarray) -> None:
        """Write a piece of a sample that begins at token `start` into its part of a row, (length,) each."""
        sample = self.parts[part].samples.read(number)
        stop = start + len(input_ids)
        input_ids[:] = sample.input_ids[start:stop]
        # Only the next piece of a split sample is read for its first token: what truncation cuts off is not trained.
        last = stop + 1 if self._options.overflow == "split" else stop
        targets = sample.input_ids[start + 1 : last]
        labels[: len(targets)] = np.where(sample.loss[start + 1 : last], targets, IGNORE_INDEX)
        labels[len(targets) :] = IGNORE_INDEX

    def row_pieces(self, epoch: int, index: int) -> list[RowPiece]:
        """What lies in a row, in order."""
        numbers, _ = self._plan.pieces(epoch, np.array([index]))
        pieces = self._pieces[numbers]
        return [
            RowPiece(
                part_number=part,
                sample=sample,
                row=int(self.parts[part].samples.rows[sample]),
                place=self.parts[part].place(sample),
                start=start,
                length=length,
            )
            for part, sample, (_, start, length) in zip(*self._located(pieces), pieces.tolist(), strict=True)
        ]

    def _located(self, pieces: np.ndarray) -> tuple[list[int], list[int]]:
        """Part of each piece, and sample in that part."""
        parts = np.searchsorted(self._offsets, pieces["sample"], side="right") - 1
        return parts.tolist(), (pieces["sample"] - self._offsets[parts]).tolist()


def _check_ids(parts: Sequence[CachedPart], vocab_size: int, key: str) -> None:
    for record in (part.samples.record for part in parts):
        if record.max_id >= vocab_size:
            raise ConfigError.one(
                f"{key}.name",
                f"{record.max_id_place} has token id {record.max_id}, but the model has only {vocab_size} embeddings: "
                "the tokenizer is not the model's",
            )
