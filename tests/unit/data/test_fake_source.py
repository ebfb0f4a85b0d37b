"""`type = "fake"`: rows keyed by (seed, epoch, index)."""

from collections.abc import Callable

import numpy as np
import pytest

from trainer.data.fake import FakeSource
from trainer.data.row import Rows

ReadRows = Callable[..., Rows]


def _source(**options: object) -> FakeSource:
    settings = {
        "seq_len": 64,
        "vocab_size": 97,
        "seed": 0,
        "num_rows": 20,
        "length": "fixed",
        "input_ids": "increasing",
    } | options
    return FakeSource(**settings)  # type: ignore[arg-type]


def test_fixed_increasing(read_rows: ReadRows) -> None:
    source = _source()
    rows = read_rows(source, 0)
    assert source.full_rows
    assert [lengths.tolist() for lengths in rows.segment_lengths] == [[64]] * 20
    assert np.array_equal(rows.labels, (rows.input_ids + 1) % 97)
    assert np.array_equal(rows.input_ids[:, 1:], rows.labels[:, :-1])
    assert np.unique(rows.input_ids[:, 0]).size > 10
    assert (rows.num_padding == 0).all()


@pytest.mark.parametrize("seq_len", [2, 3, 64])
def test_variable_increasing_restarts_in_each_document(read_rows: ReadRows, seq_len: int) -> None:
    source = _source(length="variable", seq_len=seq_len)
    rows = read_rows(source, 0)
    assert not source.full_rows
    for ids, labels, lengths in zip(rows.input_ids, rows.labels, rows.segment_lengths, strict=True):
        assert lengths.sum() == seq_len
        assert (lengths > 0).all()
        last = np.cumsum(lengths)[:-1] - 1
        inner = np.setdiff1d(np.arange(seq_len), last)
        assert np.array_equal(labels[inner], (ids[inner] + 1) % 97)
        assert np.array_equal(ids[1:], labels[:-1])
    assert max(lengths.size for lengths in rows.segment_lengths) > 1


def test_random_ids_stay_in_the_vocabulary(read_rows: ReadRows) -> None:
    rows = read_rows(_source(input_ids="random", vocab_size=5, num_rows=200), 0)
    assert np.array_equal(np.unique(rows.input_ids), np.arange(5))
    assert np.array_equal(rows.input_ids[:, 1:], rows.labels[:, :-1])


@pytest.mark.parametrize("length", ["fixed", "variable"])
@pytest.mark.parametrize("input_ids", ["increasing", "random"])
def test_rows_depend_on_seed_epoch_and_index_alone(read_rows: ReadRows, length: str, input_ids: str) -> None:
    source = _source(length=length, input_ids=input_ids, vocab_size=10**6)
    rows = read_rows(source, 3)
    alone = read_rows(_source(length=length, input_ids=input_ids, vocab_size=10**6), 3, [17])
    assert np.array_equal(alone.input_ids[0], rows.input_ids[17])
    assert np.array_equal(alone.segment_lengths[0], rows.segment_lengths[17])
    assert np.unique(rows.input_ids, axis=0).shape[0] == 20
    assert not np.array_equal(read_rows(source, 4).input_ids, rows.input_ids)
    other = _source(length=length, input_ids=input_ids, vocab_size=10**6, seed=1)
    assert not np.array_equal(read_rows(other, 3).input_ids, rows.input_ids)
