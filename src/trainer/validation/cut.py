"""Where the windows of a set lie, and what each holds: one rule for all kinds.

A set's tokens are one stream; a sequence is a range of it. The window of n inputs whose first target is token t reads
the tokens t - 1 to t + n - 1: the inputs are all but the last of them, the targets all but the first.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np

from models.batch import IGNORE_INDEX
from trainer.validation.windows import Windows

TOO_SHORT = "too short to score"
TOO_LONG = "longer than a window"
"""Reasons to leave a document out, for Windows.left_out."""


def cut_text(ends: np.ndarray, seq_len: int, *, prefix: bool, prefixed: np.ndarray | None = None) -> Windows:
    """Windows of whole documents, one sequence each, which follow each other in the stream.

    Without a prefix the windows are disjoint ranges of `seq_len` tokens, and the first token of each is not scored.

    With a prefix every token is scored once, in the rolling windows of lm-evaluation-harness (`loglikelihood_rolling`):
    the first begins with the prefix token; each later one again has up to `seq_len` targets, and its first input is
    the token before them. A last window with fewer targets left begins earlier, so that it too has `seq_len` inputs;
    its first targets are context.

    Args:
        ends: (documents,) int64, ascending: where each ends and the next one begins; the first begins at 0.
        seq_len: at least 2.
        prefix: every token is scored, the first of a document after the prefix token.
        prefixed: (documents,) bool: those that begin with the prefix token themselves. It is not scored and none is
            put before it: no model has seen two. Of a document that is nothing but this token it is taken as text: an
            EOS that is the prefix too. None: no document does.
    """
    ends = ends.astype(np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)]
    if prefix:
        own = np.zeros(len(ends), np.bool_) if prefixed is None else prefixed & (ends - starts > 1)
        return _roll(starts + own, ends, seq_len, own)
    return _cut_apart(starts, ends, seq_len)


def _cut_apart(starts: np.ndarray, ends: np.ndarray, seq_len: int) -> Windows:
    counts = (ends - starts + seq_len - 2) // seq_len  # a last window of one token has nothing to score
    sequences, numbers = _numbered(counts)
    lows = starts[sequences] + numbers * seq_len
    num_inputs = np.minimum(ends[sequences] - lows, seq_len) - 1
    return Windows(
        sequences=sequences,
        first_labels=lows + 1,
        num_inputs=num_inputs.astype(np.int32),
        num_unscored=np.zeros(len(lows), np.int32),
        prefixed=np.zeros(len(lows), np.bool_),
        left_out=_reasons(too_short=int((counts == 0).sum())),
    )


def _roll(starts: np.ndarray, ends: np.ndarray, seq_len: int, own: np.ndarray) -> Windows:
    """`starts`: of what is scored; `own`: the token before it is the document's own prefix token."""
    counts = -((starts - ends) // seq_len)
    sequences, numbers = _numbered(counts)
    lows = starts[sequences] + numbers * seq_len
    highs = np.minimum(lows + seq_len, ends[sequences])
    firsts = np.where(numbers == 0, lows, highs - seq_len)
    return Windows(
        sequences=sequences,
        first_labels=firsts,
        num_inputs=(highs - firsts).astype(np.int32),
        num_unscored=(lows - firsts).astype(np.int32),
        prefixed=(numbers == 0) & ~own[sequences],
        left_out=_reasons(too_short=int((counts == 0).sum())),
    )


def _numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sequence of every window, and its number among those of its sequence, from 0."""
    sequences = np.repeat(np.arange(len(counts)), counts)
    return sequences, np.arange(len(sequences)) - begins_of(counts)[sequences]


def cut_continuations(
    starts: np.ndarray,
    ends: np.ndarray,
    first_scored: np.ndarray,
    seq_len: int,
    *,
    prefix: Literal["never", "where_needed", "always"],
    documents: np.ndarray | None = None,
) -> Windows:
    """One window for each sequence of a context and a scored rest: its last `seq_len` inputs, as
    lm-evaluation-harness cuts a long context from the left.

    A document is left out when one of its sequences has nothing to score, or more than `seq_len` tokens.

    Args:
        starts: (sequences,) int64: first token of each in the stream.
        ends: (sequences,) int64: one past the last one.
        first_scored: (sequences,) int64: first token after the context; starts where there is no context.
        seq_len: at least 2.
        prefix: `never`: the first token of a sequence is not scored. `where_needed`: a sequence without context begins
            with the prefix token, so that all of it is scored. `always`: every sequence does, unless the window has no
            room for it.
        documents: (sequences,) int64, ascending: document of each. None: each is one.
    """
    begun = np.full(len(starts), prefix == "always")
    if prefix == "where_needed":
        begun = first_scored <= starts
    scored_from = np.where(begun, first_scored, np.maximum(first_scored, starts + 1))
    num_inputs = np.clip(ends - np.where(begun, starts, starts + 1), 0, seq_len)
    firsts = ends - num_inputs
    num_scored = ends - scored_from
    documents = np.arange(len(starts)) if documents is None else documents
    too_short = np.unique(documents[num_scored < 1])
    too_long = np.setdiff1d(documents[num_scored > seq_len], too_short)
    kept = np.flatnonzero(~np.isin(documents, np.concatenate([too_short, too_long])))
    return Windows(
        sequences=kept,
        first_labels=firsts[kept],
        num_inputs=num_inputs[kept].astype(np.int32),
        num_unscored=(scored_from - firsts)[kept].astype(np.int32),
        prefixed=(begun & (firsts == starts))[kept],
        left_out=_reasons(too_short=len(too_short), too_long=len(too_long)),
    )


def _reasons(*, too_short: int, too_long: int = 0) -> dict[str, int]:
    return {reason: count for reason, count in ((TOO_SHORT, too_short), (TOO_LONG, too_long)) if count}


def read_windows(
    windows: Windows, numbers: np.ndarray, take: Callable[[np.ndarray], np.ndarray], prefix_id: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """What the model reads in some windows and what it is asked there, one window after the other.

    Args:
        numbers: (n,) int64: which.
        take: gives the token ids at positions (k,) int64 of the stream.
        prefix_id: the prefix token; None if no window has one.

    Returns:
        (tokens,) int64 each, new arrays; labels are IGNORE_INDEX where a token is context.
    """
    lengths, firsts, prefixed = windows.num_inputs[numbers], windows.first_labels[numbers], windows.prefixed[numbers]
    begins, positions = begins_of(lengths), label_positions(windows, numbers)
    labels = take(positions).astype(np.int64)
    input_ids = np.empty_like(labels)
    input_ids[1:] = labels[:-1]
    input_ids[begins[~prefixed]] = take(firsts[~prefixed] - 1)
    if prefixed.any():
        assert prefix_id is not None, "cut with a prefix"
        input_ids[begins[prefixed]] = prefix_id
    labels[positions < np.repeat(firsts + windows.num_unscored[numbers], lengths)] = IGNORE_INDEX
    return input_ids, labels


def label_positions(windows: Windows, numbers: np.ndarray) -> np.ndarray:
    """(tokens,) int64: where the labels of some windows lie in the stream, one window after the other."""
    lengths = windows.num_inputs[numbers]
    return np.arange(lengths.sum()) + np.repeat(windows.first_labels[numbers] - begins_of(lengths), lengths)


def scored_bytes(labels: np.ndarray, lengths: np.ndarray, byte_counts: np.ndarray) -> np.ndarray:
    """(n,) int64: UTF-8 bytes that the scored tokens of each window spell.

    Args:
        labels: (tokens,) int64 of read_windows.
        lengths: (n,) labels of each window, at least one.
        byte_counts: (vocab_size,) int64 of each token.
    """
    spelled = np.where(labels == IGNORE_INDEX, 0, byte_counts[np.maximum(labels, 0)])
    return np.add.reduceat(spelled, begins_of(lengths))


def begins_of(lengths: np.ndarray) -> np.ndarray:
    """(n,) int64: where pieces of these lengths begin that lie one after the other from 0 on."""
    return np.cumsum(lengths, dtype=np.int64) - lengths
