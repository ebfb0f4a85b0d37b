"""Samples longer than a row: cut to its length, left out, cut into several, or refused."""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from trainer.data.chat.sample import Sample

Overflow = Literal["truncate", "drop", "split", "error"]


class Samples(Protocol):
    """Tokenised conversations that can be read in any order, by any thread."""

    @property
    def num_samples(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """(n,) int64: tokens."""
        ...

    @property
    def loss_tokens(self) -> np.ndarray:
        """(n,) int64: tokens that are targets."""
        ...

    def read(self, number: int, /) -> Sample: ...


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Stretches of samples, in the order of the samples."""

    samples: np.ndarray
    """(n,) int64, ascending: sample of each piece."""

    starts: np.ndarray
    """(n,) int32: its first token."""

    lengths: np.ndarray
    """(n,) int32: its tokens."""

    loss_tokens: np.ndarray
    """(n,) int32: its positions with a label."""

    def chosen(self, which: np.ndarray) -> "Pieces":
        return Pieces(
            samples=self.samples[which],
            starts=self.starts[which],
            lengths=self.lengths[which],
            loss_tokens=self.loss_tokens[which],
        )


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What of a list of samples goes into rows, and what became of those longer than a row."""

    pieces: Pieces
    """Of at most a row's length, each with at least one label."""

    num_kept: int
    """Samples that have a piece."""

    too_long: np.ndarray
    """(m,) int64, ascending: samples longer than a row."""

    lost: np.ndarray
    """int64, ascending: samples without a piece."""

    kept_long: np.ndarray
    """int64, ascending: samples longer than a row that have a piece."""

    cut_tokens: int
    """Tokens of `kept_long` that are in no piece."""

    num_left_out: int
    """Pieces of `kept_long` that carry no loss, which are left out."""


def cut(samples: Samples, *, seq_len: int, overflow: Overflow) -> Cut:
    """Pieces of at most `seq_len` tokens, each with something to train on.

    `truncate` keeps the first `seq_len` tokens. `split` makes pieces of `seq_len` tokens and a shorter last one; the
    last position of a piece has the first token of the next one as its target, so that no target is lost. With `drop`
    and `error` longer samples give no piece.
    """
    lengths = np.asarray(samples.lengths)
    too_long = np.flatnonzero(lengths > seq_len)
    pieces = _all_pieces(samples, too_long, seq_len, overflow)
    carries = pieces.loss_tokens > 0
    kept = pieces if carries.all() else pieces.chosen(np.flatnonzero(carries))
    has_piece = np.zeros(samples.num_samples, bool)
    has_piece[kept.samples] = True
    kept_long = too_long[has_piece[too_long]]
    is_kept_long = np.zeros(samples.num_samples, bool)
    is_kept_long[kept_long] = True
    in_pieces = int(kept.lengths[is_kept_long[kept.samples]].sum(dtype=np.int64))
    return Cut(
        pieces=kept,
        num_kept=int(has_piece.sum()),
        too_long=too_long,
        lost=np.flatnonzero(~has_piece),
        kept_long=kept_long,
        cut_tokens=int(lengths[kept_long].sum()) - in_pieces,
        num_left_out=int((is_kept_long[pieces.samples] & ~carries).sum()),
    )


def _all_pieces(samples: Samples, too_long: np.ndarray, seq_len: int, overflow: Overflow) -> Pieces:
    """With those that carry no loss."""
    lengths, loss_tokens = np.asarray(samples.lengths), np.asarray(samples.loss_tokens)
    short = np.flatnonzero(lengths <= seq_len)
    columns = [(short, np.zeros_like(short), lengths[short], loss_tokens[short])]
    if overflow == "truncate":
        losses = [int(samples.read(number).loss[1:seq_len].sum()) for number in too_long.tolist()]
        columns.append((too_long, np.zeros_like(too_long), np.full_like(too_long, seq_len), np.array(losses, np.int64)))
    if overflow == "split":
        columns += [_split(samples, number, seq_len) for number in too_long.tolist()]
    numbers, starts, lengths, losses = (np.concatenate(column) for column in zip(*columns, strict=True))
    pieces = Pieces(
        samples=numbers,
        starts=starts.astype(np.int32),
        lengths=lengths.astype(np.int32),
        loss_tokens=losses.astype(np.int32),
    )
    return pieces.chosen(np.argsort(numbers, kind="stable")) if len(columns) > 1 else pieces


def _split(samples: Samples, number: int, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Sample, start, length and positions with a label of the pieces of one sample."""
    loss = samples.read(number).loss
    starts = np.arange(0, len(loss), seq_len)
    # Position i has a label where token i + 1 is a target; the sample's last position has none.
    labelled = np.append(loss[1:], False)
    return (
        np.full_like(starts, number),
        starts,
        np.minimum(len(loss) - starts, seq_len),
        np.add.reduceat(labelled, starts, dtype=np.int64),
    )
