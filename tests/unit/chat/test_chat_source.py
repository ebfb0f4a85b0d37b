"""Tokenised conversations as rows: labels, segments, padding, epochs, mixtures."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from configs.errors import ConfigError
from models.batch import IGNORE_INDEX
from trainer.data.chat.source import ChatSource
from trainer.data.collate import collate
from trainer.data.drops import Drop
from trainer.data.loader import RowLoader
from trainer.data.row import Rows

MakeSource = Callable[..., ChatSource]
FillRows = Callable[..., Rows]
X = IGNORE_INDEX


def _targets(rows: Rows) -> list[int]:
    return sorted(rows.labels[rows.labels != X].tolist())


def _segments(rows: Rows) -> list[list[int]]:
    return [lengths.tolist() for lengths in rows.segment_lengths]


def test_rows_by_hand(make_chat_source: MakeSource, fill_rows: FillRows) -> None:
    """Field cases R05, R07: borders come from the lengths of the samples, and positions start anew at each; no label
    reaches over a border."""
    samples = [([11, 12, 13, 14], [0, 0, 1, 1]), ([21, 22, 23, 24, 25], [0, 1, 1, 0, 1])]
    source = make_chat_source([samples], 12, packing="sequential", padding_id=9)
    rows = fill_rows(source)
    assert source.num_rows == 1
    assert rows.input_ids.tolist() == [[11, 12, 13, 14, 21, 22, 23, 24, 25, 9, 9, 9]]
    assert rows.labels.tolist() == [[X, 13, 14, X, 22, 23, X, 25, X, X, X, X]]
    assert (_segments(rows), rows.num_padding.tolist()) == ([[4, 5, 3]], [3])
    batch = collate(rows, full_rows=source.full_rows, pin_memory=False)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch.segments.host_cu_seqlens.tolist() == [0, 4, 9, 12]
    assert not source.full_rows


def test_ends_of_text_inside_a_sample_are_targets(make_chat_source: MakeSource, fill_rows: FillRows) -> None:
    """Field case R23: padding has the id of the end of text; what is padding is known by lengths, not by value."""
    rows = fill_rows(make_chat_source([[([5, 6, 0, 7, 8, 0], [0, 1, 1, 0, 1, 1])]], 8, padding_id=0))
    assert rows.input_ids.tolist() == [[5, 6, 0, 7, 8, 0, 0, 0]]
    assert rows.labels.tolist() == [[6, 0, X, 8, 0, X, X, X]]
    assert rows.num_padding.tolist() == [2]


def test_a_sample_that_ends_with_the_row(make_chat_source: MakeSource, fill_rows: FillRows) -> None:
    """Field cases R09, R52: nothing is left, so there is no segment of padding, least of all an empty one."""
    samples = [([1, 2, 3, 4], [0, 0, 0, 1])] * 2
    rows = fill_rows(make_chat_source([samples], 8))
    assert (_segments(rows), rows.num_padding.tolist()) == ([[4, 4]], [0])
    source = make_chat_source([samples], 4)
    assert (_segments(fill_rows(source)), source.full_rows) == ([[4], [4]], True)


@pytest.mark.parametrize("packing", ["best_fit", "sequential", "none"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_sample_once(
    make_chat_source: MakeSource, fill_rows: FillRows, random_samples: Callable, packing: str, shuffle: bool
) -> None:
    """Field case R35: as many targets after packing as before, and the same ones. Field case R59: each epoch its own
    order, the same whenever it is asked for."""
    parts = [random_samples(0, 150, longest=20), [], random_samples(1, 50, longest=32)]
    source = make_chat_source(parts, 32, packing=packing, shuffle=shuffle)
    samples = [sample for part in parts for sample in part]
    expected = sorted(id_ for ids, loss in samples for id_, on in zip(ids, loss, strict=True) if on)
    texts = sorted(ids for ids, _ in samples)
    epochs = [fill_rows(source, epoch) for epoch in range(4)]
    for rows in epochs:
        assert _targets(rows) == expected
        found = []
        for ids, lengths, padding in zip(rows.input_ids, rows.segment_lengths, rows.num_padding, strict=True):
            segments = np.split(ids, np.cumsum(lengths)[:-1])
            found += [segment.tolist() for segment in segments[: len(lengths) - (padding > 0)]]
            assert lengths.sum() == 32 and lengths.min() > 0 and (padding == 0 or lengths[-1] == padding)
        assert sorted(found) == texts
        assert sorted(map(tuple, _segments(rows))) == sorted(map(tuple, _segments(epochs[0])))
    assert len({rows.input_ids.tobytes() for rows in epochs}) == (4 if shuffle else 1)
    assert source.counts.loss_tokens == len(expected)
    again = make_chat_source(parts, 32, packing=packing, shuffle=shuffle)
    assert np.array_equal(fill_rows(again, 3, [7, 2]).input_ids, epochs[3].input_ids[[7, 2]])
    other = make_chat_source(parts, 32, packing=packing, shuffle=shuffle, seed=1)
    assert np.array_equal(fill_rows(other, 3).input_ids, epochs[3].input_ids) is not shuffle


def test_best_fit_deals_samples_of_equal_length_anew(make_chat_source: MakeSource, fill_rows: FillRows) -> None:
    """Who shares a row with whom changes from epoch to epoch; with `sequential` neighbours stay together."""
    samples = [([i + 1] * 4, [0, 1, 1, 1]) for i in range(40)]
    company = {}
    for packing in ("best_fit", "sequential"):
        source = make_chat_source([samples], 8, packing=packing, shuffle=True)
        company[packing] = {
            frozenset(row.tolist()) for epoch in range(10) for row in fill_rows(source, epoch).input_ids[:, ::4]
        }
    assert company["sequential"] == {frozenset((i + 1, i + 2)) for i in range(0, 40, 2)}
    assert len(company["best_fit"]) > 150


def test_too_little_data_trains_on_a_padded_row(make_chat_source: MakeSource, fill_rows: FillRows) -> None:
    """Field case R53: three samples of 10 tokens and rows of 64."""
    samples = [([i] * 10, [0] * 5 + [1] * 5) for i in (1, 2, 3)]
    source = make_chat_source([samples], 64)
    assert source.num_rows == 1
    assert (_segments(fill_rows(source)), source.counts.padding_tokens) == ([[10, 10, 10, 34]], 34)


def test_three_counts_of_tokens(make_chat_source: MakeSource) -> None:
    """Field case R107: 40 % padding, 30 % prompt: positions, tokens of samples and loss tokens are counted apart."""
    source = make_chat_source([[([5] * 6, [0, 0, 0, 1, 1, 1])] * 4], 10, packing="none")
    loader = RowLoader(source, batch_size=4, micro_batch_size=2, dp_rank=0, dp_size=1, num_workers=0, pin_memory=False)
    batches = loader.step(0)
    assert sum(batch.num_tokens for batch in batches.micro_batches) == 40
    assert sum(batch.num_padding_tokens for batch in batches.micro_batches) == 16
    assert batches.num_loss_tokens == 12
    counts = source.counts
    assert (counts.tokens, counts.padding_tokens, counts.loss_tokens, counts.padding_share) == (24, 16, 12, 0.4)


def test_probabilities_decide_the_samples_of_an_epoch(make_chat_source: MakeSource, fill_rows: FillRows) -> None:
    """A sample brings all of its pieces; those that are never drawn are counted."""
    parts = [[([1, 2, 3], [0, 1, 1])] * 30, [([4] * 5, [0, 1, 1, 1, 1])] * 10]
    options = {"probabilities": [0.5, 0.5], "packing": "none", "overflow": "split"}
    all_of_them = make_chat_source(parts, 3, stopping_strategy="all_exhausted", **options)
    first = make_chat_source(parts, 3, stopping_strategy="first_exhausted", **options)
    for source in (all_of_them, first):
        rows = fill_rows(source)
        small, large = (int((rows.input_ids[:, 0] == id_).sum()) for id_ in (1, 4))
        assert large % 2 == 0
        assert source.counts.samples == small + large // 2
        if source is first:
            assert large == 20 and small < 30
            assert source.counts.not_drawn == 30 - small
        else:
            assert small >= 30 and large >= 20
            assert source.counts.not_drawn == 0
    assert "samples not drawn by the mixture" in first.description


def test_any_thread_may_fill_any_row(
    make_chat_source: MakeSource, fill_rows: FillRows, random_samples: Callable
) -> None:
    source = make_chat_source([random_samples(3, 300, longest=32)], 32, shuffle=True)
    expected = [fill_rows(source, epoch).labels for epoch in range(6)]
    with ThreadPoolExecutor(4) as threads:
        jobs = [(epoch, row) for row in range(source.num_rows) for epoch in range(6)]
        found = list(threads.map(lambda job: fill_rows(source, job[0], [job[1]]).labels[0], jobs))
    assert all(np.array_equal(row, expected[epoch][index]) for (epoch, index), row in zip(jobs, found, strict=True))


def test_fingerprint_is_of_contents_and_order(make_chat_source: MakeSource, random_samples: Callable) -> None:
    """A run goes on after its data was moved, and not with other data or another order."""
    parts = [random_samples(0, 20, longest=9), random_samples(1, 20, longest=9)]
    first = make_chat_source(parts, 16).fingerprint
    assert json.loads(json.dumps(first)) == first
    assert make_chat_source(parts, 16, names=["moved.jsonl", "too.jsonl"]).fingerprint == first
    others = [
        make_chat_source(parts[::-1], 16),
        make_chat_source(parts, 17),
        *(
            make_chat_source(parts, 16, **{name: value})
            for name, value in {
                "packing": "none",
                "overflow": "split",
                "seed": 1,
                "shuffle": True,
                "padding_id": 1,
                "probabilities": [0.5, 0.5],
            }.items()
        ),
    ]
    assert all(other.fingerprint != first for other in others)


def test_ids_beyond_the_vocabulary(make_chat_source: MakeSource) -> None:
    """Field case R47: id == vocab_size is an error on the CPU that names the row."""
    parts = [[([1, 2], [0, 1])], [([1, 2], [0, 1]), ([3, 300], [0, 1])]]
    assert make_chat_source(parts, 8, vocab_size=301).num_rows == 1
    with pytest.raises(ConfigError) as caught:
        make_chat_source(parts, 8, vocab_size=300)
    assert caught.value.faults[0].key == "data.name"
    assert "b.jsonl, line 3 has token id 300, but the model has only 300 embeddings" in str(caught.value)


def test_the_pieces_of_a_row_are_known_by_their_place(make_chat_source: MakeSource) -> None:
    parts = [[([1] * 6, [0, 1, 1, 1, 1, 1])], [([2] * 2, [0, 1]), ([3] * 3, [0, 1, 1])]]
    source = make_chat_source(parts, 4, overflow="split", packing="sequential")
    found = [
        [
            (piece.part_number, piece.sample, piece.row, piece.place, piece.start, piece.length)
            for piece in source.row_pieces(0, index)
        ]
        for index in range(source.num_rows)
    ]
    assert found == [
        [(0, 0, 0, "a.jsonl, line 1", 0, 4)],
        [(0, 0, 0, "a.jsonl, line 1", 4, 2), (1, 0, 0, "b.jsonl, line 1", 0, 2)],
        [(1, 1, 2, "b.jsonl, line 3", 0, 3)],
    ]
    assert [part.part.name for part in source.parts] == ["a.jsonl", "b.jsonl"]


def test_description_leaves_nothing_out(make_chat_source: MakeSource) -> None:
    dropped = {
        "no messages": Drop(count=2, first_place="a.jsonl, line 2"),
        "empty answer": Drop(count=1, first_place="a.jsonl, line 4"),
    }
    samples = [([1] * 5, [0, 1, 1, 1, 1]), ([2] * 9, [0] * 8 + [1])]
    source = make_chat_source([samples], 4, dropped=dropped)
    assert source.description == (
        "1 rows of 4 per epoch, 1 samples of 5 conversations: 4 tokens, 3 with loss, 0.00% padding; "
        "1 (20.0%, a.jsonl, line 1) truncated, 1 tokens cut off; "
        "left out: 2 no messages (first: a.jsonl, line 2), 1 empty answer (a.jsonl, line 4), "
        "1 no loss token in the first seq_len = 4 tokens (a.jsonl, line 3)"
    )
    assert (source.counts.longest, source.counts.longest_place) == (9, "a.jsonl, line 3")
    assert source.lengths.tolist() == [5, 9]
    assert replace(source.counts, truncated=None).text().count("truncated") == 0


def test_nothing_to_train_on(make_chat_source: MakeSource) -> None:
    """Field case R19: all labels cut away, or nothing there: an error that says why, before the first step."""
    dropped = {"no messages": Drop(count=2, first_place="a.jsonl, line 2")}
    with pytest.raises(ConfigError) as caught:
        make_chat_source([[([1] * 9, [0] * 8 + [1])]], 4, dropped=dropped)
    assert caught.value.faults[0].key == "data.name"
    assert caught.value.faults[0].message == (
        "0 supervised tokens in 3 conversations: 2 no messages (first: a.jsonl, line 2), "
        "1 no loss token in the first seq_len = 4 tokens (a.jsonl, line 1)"
    )
    with pytest.raises(ConfigError, match="0 supervised tokens in 0 conversations: there are none"):
        make_chat_source([[]], 4)
