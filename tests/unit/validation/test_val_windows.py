"""The windows of documents and of continuations: every target once, never longer than asked for, as lm-eval cuts."""

from collections import Counter
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.batch import IGNORE_INDEX
from trainer.validation.cut import TOO_LONG, TOO_SHORT, cut_continuations, cut_text, read_windows
from trainer.validation.windows import Windows

PREFIX = 999
LENGTHS = st.lists(st.integers(0, 30), max_size=12)
SEQ_LENS = st.integers(2, 12)
QUICK = settings(max_examples=150, deadline=None)


def read_all(windows: Windows, stream: np.ndarray) -> list[tuple[int, list[int], list[int]]]:
    """Sequence, input ids and labels of every window."""

    def take(positions: np.ndarray) -> np.ndarray:
        assert (positions >= 0).all()
        return stream[positions]

    input_ids, labels = read_windows(windows, np.arange(len(windows.sequences)), take, PREFIX)
    borders = np.cumsum(windows.num_inputs)[:-1]
    pieces = zip(windows.sequences.tolist(), np.split(input_ids, borders), np.split(labels, borders), strict=False)
    return [(sequence, of_input.tolist(), of_labels.tolist()) for sequence, of_input, of_labels in pieces]


def scored_in(pieces: list[tuple[int, list[int], list[int]]]) -> list[int]:
    return [label for _, _, labels in pieces for label in labels if label != IGNORE_INDEX]


def check_shapes(windows: Windows, seq_len: int) -> None:
    """What every cut promises, see Windows."""
    assert (np.diff(windows.sequences) >= 0).all()
    assert (windows.num_inputs >= 1).all() and (windows.num_inputs <= seq_len).all()
    assert (windows.num_unscored >= 0).all() and (windows.num_unscored < windows.num_inputs).all()
    assert [windows.sequences.dtype, windows.first_labels.dtype] == [np.int64, np.int64]
    assert [windows.num_inputs.dtype, windows.num_unscored.dtype] == [np.int32, np.int32]
    assert windows.prefixed.dtype == np.bool_


def test_windows_of_each_document_are_disjoint_and_start_at_its_first_token() -> None:
    windows = cut_text(np.array([5, 6, 14]), 4, prefix=False)
    # documents [0, 5), [5, 6), [6, 14): windows 0-4, 4-5 (one token: nothing to score), 5-6 (the same), 6-10, 10-14
    assert windows.sequences.tolist() == [0, 2, 2]
    assert windows.first_labels.tolist() == [1, 7, 11]
    assert windows.num_inputs.tolist() == [3, 3, 3]
    assert windows.num_unscored.tolist() == [0, 0, 0]
    assert windows.prefixed.tolist() == [False] * 3
    assert windows.left_out == {TOO_SHORT: 1}


def test_with_a_prefix_every_token_is_scored_and_the_last_window_is_full() -> None:
    pieces = read_all(cut_text(np.array([5, 6, 14]), 4, prefix=True), np.arange(14))
    ignored = IGNORE_INDEX
    assert pieces == [
        (0, [PREFIX, 0, 1, 2], [0, 1, 2, 3]),
        (0, [0, 1, 2, 3], [ignored, ignored, ignored, 4]),
        (1, [PREFIX], [5]),
        (2, [PREFIX, 6, 7, 8], [6, 7, 8, 9]),
        (2, [9, 10, 11, 12], [10, 11, 12, 13]),
    ]


def test_a_document_that_begins_with_the_prefix_gets_no_second_one() -> None:
    windows = cut_text(np.array([5, 6]), 3, prefix=True, prefixed=np.array([True, True]))
    assert read_all(windows, np.array([PREFIX, 1, 2, 3, 4, PREFIX])) == [
        (0, [PREFIX, 1, 2], [1, 2, 3]),
        (0, [1, 2, 3], [IGNORE_INDEX, IGNORE_INDEX, 4]),
        (1, [PREFIX], [PREFIX]),
    ]


@QUICK
@given(LENGTHS, SEQ_LENS)
def test_without_a_prefix_all_but_the_first_tokens_are_scored_once(lengths: list[int], seq_len: int) -> None:
    ends = np.cumsum(lengths, dtype=np.int64)
    windows = cut_text(ends, seq_len, prefix=False)
    check_shapes(windows, seq_len - 1)
    starts = ends - lengths
    ranges = [range(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    expected = [token for tokens in ranges for token in tokens if (token - tokens.start) % seq_len]
    assert scored_in(read_all(windows, np.arange(sum(lengths)))) == expected
    assert windows.left_out.get(TOO_SHORT, 0) == sum(length < 2 for length in lengths)
    assert sum(windows.left_out.values()) + len(set(windows.sequences.tolist())) == len(lengths)


@QUICK
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=12), SEQ_LENS)
def test_with_a_prefix_every_token_is_scored_once(documents: list[tuple[int, bool]], seq_len: int) -> None:
    """Some documents begin with the prefix token themselves."""
    lengths = np.array([length for length, _ in documents], np.int64)
    own = np.array([begins and length > 0 for length, begins in documents], np.bool_)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    stream = np.arange(sum(lengths))
    stream[starts[own]] = PREFIX
    windows = cut_text(ends, seq_len, prefix=True, prefixed=own)
    check_shapes(windows, seq_len)
    pieces = read_all(windows, stream)
    unscored = {start for start, length in zip(starts[own].tolist(), lengths[own].tolist(), strict=True) if length > 1}
    assert scored_in(pieces) == [token for place, token in enumerate(stream.tolist()) if place not in unscored]
    for sequence, input_ids, labels in pieces:
        tokens = stream[starts[sequence] : ends[sequence]].tolist()
        assert set(input_ids) <= {PREFIX, *tokens} and set(labels) <= {IGNORE_INDEX, *tokens}
        assert (input_ids + labels[-1:]).count(PREFIX) <= 1 or len(tokens) == 1
    assert windows.left_out.get(TOO_SHORT, 0) == (lengths == 0).sum()


def test_rolling_windows_are_those_of_lm_evaluation_harness() -> None:
    utils = pytest.importorskip("lm_eval.utils", reason="lm_eval is not installed (the group `peers`)")
    for seq_len in (2, 3, 7, 16):
        lengths = list(range(1, 4 * seq_len + 3))
        windows = cut_text(np.cumsum(lengths), seq_len, prefix=True)
        ours = read_all(windows, np.arange(sum(lengths)))
        theirs = []
        for document, length in enumerate(lengths):
            tokens = list(range(sum(lengths[:document]), sum(lengths[:document]) + length))
            for pair in utils.get_rolling_token_windows(tokens, PREFIX, seq_len, 1):
                context, scored = utils.make_disjoint_window(pair)
                # What HFLM._loglikelihood_tokens makes of a pair.
                input_ids = (context + scored)[-(seq_len + 1) :][:-1]
                labels = [IGNORE_INDEX] * (len(input_ids) - len(scored)) + scored
                theirs.append((document, input_ids, labels))
        assert ours == theirs


def cut_one(num_context: int, num_scored: int, seq_len: int, prefix: Literal["never", "where_needed", "always"]):
    """(input ids, labels) of a sequence that begins at token 10; None where it is left out, then the reasons."""
    ends = np.array([10 + num_context + num_scored])
    first_scored = np.array([10 + num_context])
    windows = cut_continuations(np.array([10]), ends, first_scored, seq_len, prefix=prefix)
    check_shapes(windows, seq_len)
    pieces = [piece[1:] for piece in read_all(windows, np.arange(100))]
    return (pieces[0] if pieces else None), windows.left_out


@pytest.mark.parametrize(
    ("num_context", "num_scored", "prefix", "expected"),
    [
        (2, 2, "never", ([10, 11, 12], [IGNORE_INDEX, 12, 13])),
        (2, 2, "where_needed", ([10, 11, 12], [IGNORE_INDEX, 12, 13])),
        (2, 2, "always", ([PREFIX, 10, 11, 12], [IGNORE_INDEX, IGNORE_INDEX, 12, 13])),
        # the context is cut from the left, and so is the prefix
        (3, 2, "always", ([10, 11, 12, 13], [IGNORE_INDEX, IGNORE_INDEX, 13, 14])),
        (9, 2, "where_needed", ([16, 17, 18, 19], [IGNORE_INDEX, IGNORE_INDEX, 19, 20])),
        # no context
        (0, 2, "never", ([10], [11])),
        (0, 2, "where_needed", ([PREFIX, 10], [10, 11])),
        (0, 2, "always", ([PREFIX, 10], [10, 11])),
        (0, 4, "where_needed", ([PREFIX, 10, 11, 12], [10, 11, 12, 13])),
        (0, 5, "never", ([10, 11, 12, 13], [11, 12, 13, 14])),
        (1, 4, "always", ([10, 11, 12, 13], [11, 12, 13, 14])),
    ],
)
def test_a_continuation_is_scored_in_its_last_inputs(num_context, num_scored, prefix, expected) -> None:
    assert cut_one(num_context, num_scored, 4, prefix) == (expected, {})


@pytest.mark.parametrize(
    ("num_context", "num_scored", "prefix", "reason"),
    [
        (3, 0, "always", TOO_SHORT),
        (0, 0, "where_needed", TOO_SHORT),
        (0, 1, "never", TOO_SHORT),
        (0, 5, "where_needed", TOO_LONG),
        (0, 6, "never", TOO_LONG),
        (2, 5, "always", TOO_LONG),
    ],
)
def test_what_cannot_be_scored_whole_is_left_out(num_context, num_scored, prefix, reason) -> None:
    assert cut_one(num_context, num_scored, 4, prefix) == (None, {reason: 1})


def test_all_options_of_a_document_are_left_out_together() -> None:
    lengths, documents = np.array([3, 9, 3, 3, 1, 9, 3, 3]), np.array([0, 0, 1, 1, 2, 2, 3, 3])
    ends = np.cumsum(lengths)
    windows = cut_continuations(ends - lengths, ends, ends - lengths + 1, 4, prefix="where_needed", documents=documents)
    # document 0 has an option of 8 scored tokens, document 2 one of 0 and one of 8: it is counted once
    assert windows.sequences.tolist() == [2, 3, 6, 7]
    assert windows.left_out == {TOO_SHORT: 1, TOO_LONG: 1}


SEQUENCES = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=10)


@QUICK
@given(SEQUENCES, SEQ_LENS, st.sampled_from(["never", "where_needed", "always"]))
def test_scored_tokens_of_continuations_once(parts: list[tuple[int, int]], seq_len: int, prefix: str) -> None:
    lengths = np.array([context + scored for context, scored in parts], np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    contexts = np.array([context for context, _ in parts], np.int64)
    windows = cut_continuations(starts, ends, starts + contexts, seq_len, prefix=prefix)  # type: ignore[arg-type]
    check_shapes(windows, seq_len)
    pieces = read_all(windows, np.arange(int(lengths.sum())))
    assert max(Counter(sequence for sequence, _, _ in pieces).values(), default=1) == 1
    for sequence, input_ids, labels in pieces:
        first = int(starts[sequence]) + (parts[sequence][0] or int(prefix == "never"))
        assert [label for label in labels if label != IGNORE_INDEX] == list(range(first, int(ends[sequence])))
        # as long as the window or as all there is
        whole = [PREFIX] * (prefix == "always" or (prefix == "where_needed" and not parts[sequence][0]))
        whole += list(range(int(starts[sequence]), int(ends[sequence]) - 1))
        assert input_ids == whole[-seq_len:]
    assert sum(windows.left_out.values()) + len(pieces) == len(parts)


def test_nothing_gives_no_window() -> None:
    empty = np.empty(0, np.int64)
    for prefix in (False, True):
        assert read_all(cut_text(empty, 4, prefix=prefix), empty) == []
    assert read_all(cut_continuations(empty, empty, empty, 4, prefix="always"), empty) == []


def test_a_window_is_a_copy() -> None:
    """The set's tokens may be a read-only map of 16-bit ids; labels are changed."""
    stream = np.arange(8, dtype=np.uint16)
    stream.flags.writeable = False
    windows = cut_text(np.array([8]), 6, prefix=True)
    input_ids, labels = read_windows(windows, np.array([1]), stream.__getitem__, PREFIX)
    assert [input_ids.tolist(), labels.tolist()] == [[1, 2, 3, 4, 5, 6], [IGNORE_INDEX] * 4 + [6, 7]]
    assert input_ids.dtype == labels.dtype == np.int64
