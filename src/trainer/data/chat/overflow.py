"""Samples longer than a row: cut to its length, left out, cut into several, or refused."""

from dataclasses import dataclass

import numpy as np

from configs.data import Overflow
from trainer.data.chat.cache.cache import SampleCache

PIECE = np.dtype([("sample", np.uint32), ("start", np.int32), ("length", np.int32)])
"""A stretch of a sample: number of the sample, first token in it, tokens."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What of a list of samples goes into rows, and what became of those longer than a row."""

    pieces: np.ndarray
    """(n,) PIECE, in the order of the samples: of at most a row's length, each with at least one label."""

    loss_tokens: np.ndarray
    """(n,) int64: labels of each piece."""

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


def cut(samples: SampleCache, *, seq_len: int, overflow: Overflow) -> Cut:
    """Pieces of at most `seq_len` tokens, each with something to train on.

    `truncate` keeps the first `seq_len` tokens. `split` makes pieces of `seq_len` tokens and a shorter last one; the
    last position of a piece has the first token of the next one as its target, so that no target is lost. With `drop`
    and `error` longer samples give no piece.
    """
    lengths = samples.lengths
    too_long = np.flatnonzero(lengths > seq_len)
    num_pieces = np.ones(len(lengths), np.int64)
    match overflow:
        case "split":
            num_pieces[too_long] = -(-lengths[too_long] // seq_len)
        case "drop" | "error":
            num_pieces[too_long] = 0
    firsts = np.cumsum(num_pieces) - num_pieces
    pieces = np.empty(num_pieces.sum(), PIECE)
    numbers = np.repeat(np.arange(len(lengths)), num_pieces)
    pieces["sample"] = numbers
    pieces["start"] = (np.arange(len(pieces)) - firsts[numbers]) * seq_len
    pieces["length"] = np.minimum(lengths[numbers] - pieces["start"], seq_len)
    loss_tokens = samples.loss_tokens[numbers]
    for number in too_long[num_pieces[too_long] > 0].tolist():
        loss = samples.read(number).loss
        # Position i has a label where token i + 1 is a target; the last position has none.
        labelled = np.append(loss[1:seq_len] if overflow == "truncate" else loss[1:], False)
        first, starts = firsts[number], np.arange(0, len(labelled), seq_len)
        loss_tokens[first : first + len(starts)] = np.add.reduceat(labelled, starts, dtype=np.int64)
    carries = loss_tokens > 0
    has_piece = np.zeros(len(lengths), bool)
    has_piece[numbers[carries]] = True
    kept_long = too_long[has_piece[too_long]]
    is_of_kept_long = ((lengths > seq_len) & has_piece)[numbers]
    return Cut(
        pieces=pieces[carries],
        loss_tokens=loss_tokens[carries],
        too_long=too_long,
        lost=np.flatnonzero(~has_piece),
        kept_long=kept_long,
        cut_tokens=int(lengths[kept_long].sum() - pieces["length"][is_of_kept_long & carries].sum(dtype=np.int64)),
        num_left_out=int((is_of_kept_long & ~carries).sum()),
    )
