"""Samples longer than a row: `truncate`, `drop`, `split`, `error`."""

from collections.abc import Callable

import numpy as np
import pytest

from configs.errors import ConfigError
from models.batch import IGNORE_INDEX
from trainer.data.chat.source import ChatSource
from trainer.data.row import Rows

MakeSource = Callable[..., ChatSource]
FillRows = Callable[..., Rows]
X = IGNORE_INDEX
LONG = (list(range(1, 21)), [0] * 3 + [1] * 17)
SHORT = ([31, 32], [0, 1])


def test_truncate(make_chat_source: MakeSource, fill_rows: FillRows) -> None:
    """Field cases R51, R28, R38: seq_len 8, a sample of 20: its first 8 tokens, answer tokens among them supervised;
    nothing is put in place of the end that was cut off; counted."""
    source = make_chat_source([[LONG, SHORT]], 8, packing="none")
    rows = fill_rows(source)
    assert rows.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [31, 32, 0, 0, 0, 0, 0, 0]]
    assert rows.labels.tolist() == [[X, X, 4, 5, 6, 7, 8, X], [32, X, X, X, X, X, X, X]]
    counts = source.counts
    assert counts.truncated is not None and counts.split is None
    assert (counts.truncated.count, counts.truncated.first_place, counts.cut_tokens) == (1, "a.jsonl, line 1", 12)
    assert (counts.samples, counts.tokens, counts.loss_tokens) == (2, 10, 6)


def test_truncated_before_the_answer(make_chat_source: MakeSource) -> None:
    """Field case R19: for some rows: counted and left out. The last kept token is a target, or there is none."""
    at_the_end = (list(range(1, 11)), [0] * 7 + [1] * 3)
    after_the_end = (list(range(1, 11)), [0] * 8 + [1] * 2)
    source = make_chat_source([[at_the_end, after_the_end, after_the_end]], 8)
    assert (source.counts.samples, source.counts.loss_tokens) == (1, 1)
    (reason,) = source.counts.dropped
    assert reason == "no loss token in the first seq_len = 8 tokens"
    drop = source.counts.dropped[reason]
    assert (drop.count, drop.first_place) == (2, "a.jsonl, line 3")
    assert source.counts.truncated is not None and source.counts.truncated.count == 1


def test_drop(make_chat_source: MakeSource, fill_rows: FillRows) -> None:
    """Field case R51."""
    source = make_chat_source([[SHORT], [LONG, LONG]], 8, overflow="drop")
    assert fill_rows(source).input_ids.tolist() == [[31, 32, 0, 0, 0, 0, 0, 0]]
    drop = source.counts.dropped["longer than seq_len = 8"]
    assert (drop.count, drop.first_place) == (2, "b.jsonl, line 1")
    assert source.counts.truncated is None and source.counts.cut_tokens == 0


def test_split(make_chat_source: MakeSource, fill_rows: FillRows) -> None:
    """Field cases R51, R50: 8 + 8 + 4; the last position of a piece has the first token of the next as its target."""
    source = make_chat_source([[LONG]], 8, overflow="split", packing="sequential")
    rows = fill_rows(source)
    assert rows.input_ids.tolist() == [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [9, 10, 11, 12, 13, 14, 15, 16],
        [17, 18, 19, 20, 0, 0, 0, 0],
    ]
    assert rows.labels.tolist() == [
        [X, X, 4, 5, 6, 7, 8, 9],
        [10, 11, 12, 13, 14, 15, 16, 17],
        [18, 19, 20, X, X, X, X, X],
    ]
    counts = source.counts
    assert counts.split is not None and counts.truncated is None
    assert (counts.split.count, counts.samples, counts.loss_tokens) == (1, 1, 17)
    assert (counts.pieces_left_out, counts.cut_tokens) == (0, 0)


def test_pieces_without_loss_are_left_out(make_chat_source: MakeSource, fill_rows: FillRows) -> None:
    """A piece whose only target is its neighbour's first token is kept: it is where that target is trained."""
    sample = (list(range(1, 18)), [0] * 8 + [1] + [0] * 8)
    source = make_chat_source([[sample]], 4, overflow="split")
    rows = fill_rows(source)
    assert rows.input_ids.tolist() == [[5, 6, 7, 8]]
    assert rows.labels.tolist() == [[X, X, X, 9]]
    counts = source.counts
    assert (counts.pieces_left_out, counts.cut_tokens, counts.tokens, counts.loss_tokens) == (4, 13, 4, 1)
    assert source.description.endswith("1 (100.0%, a.jsonl, line 1) split, 4 pieces without loss left out (13 tokens)")


@pytest.mark.parametrize("seq_len", [2, 3, 7, 16])
def test_split_trains_every_target_and_no_token_is_lost(
    make_chat_source: MakeSource, fill_rows: FillRows, random_samples: Callable, seq_len: int
) -> None:
    """Field case R50: tokens in = tokens in rows + those reported as left out."""
    samples = random_samples(seq_len, 60, longest=40)
    source = make_chat_source([samples], seq_len, overflow="split", shuffle=True)
    rows = fill_rows(source, 5)
    expected = sorted(id_ for ids, loss in samples for id_, on in zip(ids, loss, strict=True) if on)
    assert sorted(rows.labels[rows.labels != X].tolist()) == expected
    assert (rows.labels != X).any(axis=1).all()
    counts = source.counts
    assert sum(len(ids) for ids, _ in samples) == counts.tokens + counts.cut_tokens
    assert rows.input_ids.size == counts.tokens + counts.padding_tokens
    assert counts.samples == 60 and counts.loss_tokens == len(expected)


@pytest.mark.parametrize("overflow", ["truncate", "drop", "split"])
def test_samples_that_fit_are_the_same_under_any_policy(
    make_chat_source: MakeSource, fill_rows: FillRows, random_samples: Callable, overflow: str
) -> None:
    parts = [random_samples(2, 30, longest=16)]
    expected = fill_rows(make_chat_source(parts, 16, overflow="error"))
    rows = fill_rows(make_chat_source(parts, 16, overflow=overflow))
    assert np.array_equal(rows.input_ids, expected.input_ids) and np.array_equal(rows.labels, expected.labels)


def test_error_names_the_first_one(make_chat_source: MakeSource) -> None:
    """Field case R51."""
    with pytest.raises(ConfigError) as caught:
        make_chat_source([[SHORT], [SHORT, LONG, LONG]], 8, overflow="error")
    assert caught.value.faults[0].key == "data.overflow"
    assert caught.value.faults[0].message == (
        '"error": b.jsonl, line 3 has 20 tokens, more than seq_len = 8, as have 2 conversations in all; '
        "raise data.seq_len or choose another overflow"
    )
