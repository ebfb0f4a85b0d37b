"""Who meets whom in ring attention: every causal pair of a document once, none besides, and as many on every rank."""

import numpy as np
import pytest
import torch

from models.layers.context_parallel.ring import share_borders
from models.layers.context_parallel.ring_plan import RingPlan, ring_plan


def _borders(rows: list[list[int]]) -> np.ndarray:
    """Document borders of rows, given by the lengths of their documents."""
    return np.cumsum([0, *(length for row in rows for length in row)]).astype(np.int32)


def _plans(rows: list[list[int]], size: int) -> list[RingPlan]:
    return [ring_plan(_borders(rows), seq_len=sum(rows[0]), rank=rank, size=size) for rank in range(size)]


def _flat_positions(num_rows: int, seq_len: int, rank: int, size: int) -> np.ndarray:
    """(rows, seq_len / size): where the positions of a share lie in the flattened whole rows."""
    chunk = seq_len // (2 * size)
    of_row = np.arange(seq_len).reshape(2 * size, chunk)[[rank, 2 * size - 1 - rank]].ravel()
    return np.arange(num_rows)[:, None] * seq_len + of_row


def _met(rows: list[list[int]], size: int, rank: int) -> np.ndarray:
    """(positions, positions): how often each query meets each key through the plan of one rank."""
    num_rows, seq_len = len(rows), sum(rows[0])
    plan = _plans(rows, size)[rank]
    positions = [_flat_positions(num_rows, seq_len, other, size) for other in range(size)]
    count = np.zeros((num_rows * seq_len,) * 2, int)
    start = 0
    for length in plan.documents:
        own = positions[rank].ravel()[start : start + length]
        count[own[:, None], own] += np.tri(length, dtype=int)
        start += length
    assert start == positions[rank].size
    for step in plan.steps:
        for pair in step.received:
            for row in range(pair.queries.first_row, pair.queries.first_row + pair.queries.num_rows):
                queries = positions[rank][row, pair.queries.positions]
                keys = positions[step.source][row, pair.keys.positions]
                assert queries.size and keys.size
                count[queries[:, None], keys] += 1
    return count


def _expected(rows: list[list[int]]) -> np.ndarray:
    document = np.repeat(np.arange(sum(map(len, rows))), [length for row in rows for length in row])
    return ((document[:, None] == document) & np.tri(document.size, dtype=bool)).astype(int)


ROWS = {
    "one document": [[48]],
    "rows of one document": [[48], [48], [48]],
    "short documents": [[7, 5, 1, 11, 24], [3, 45], [1] * 48],
    "borders at the chunks' borders": [[12, 12, 24], [24, 24], [6, 6, 36]],
    "over several chunks": [[5, 30, 13], [13, 30, 5], [1, 46, 1]],
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_pairs_of_a_document_are_met_once(rows, size):
    met = sum(_met(rows, size, rank) for rank in range(size))
    np.testing.assert_array_equal(met, _expected(rows))


def test_any_documents():
    generator = np.random.default_rng(0)
    for _ in range(60):
        size = int(generator.integers(2, 6))
        seq_len = 2 * size * int(generator.integers(1, 6))
        rows = []
        for _ in range(int(generator.integers(1, 4))):
            inner = generator.choice(seq_len - 1, int(generator.integers(0, seq_len - 1)), replace=False) + 1
            rows.append(np.diff(np.sort(np.concatenate([[0, seq_len], inner]))).tolist())
        met = sum(_met(rows, size, rank) for rank in range(size))
        np.testing.assert_array_equal(met, _expected(rows))


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_the_same_work(size):
    counts = [int(_met([[48], [48]], size, rank).sum()) for rank in range(size)]
    assert counts == [2 * 48 * 49 // 2 // size] * size


def test_what_is_sent_is_what_the_others_expect():
    rows, size = ROWS["short documents"], 4
    plans = _plans(rows, size)
    for rank, plan in enumerate(plans):
        assert [(step.source, step.target) for step in plan.steps] == [
            ((rank - turn) % size, (rank + turn) % size) for turn in (1, 2, 3)
        ]
        for turn, step in enumerate(plan.steps):
            assert plans[step.target].steps[turn].source == rank
            assert plans[step.target].steps[turn].received_keys == step.sent_keys


def test_only_keys_that_are_met_travel():
    """Of rows of 16 on two ranks: chunks of 4, rank 0 has positions 0-3 and 12-15, rank 1 has 4-11."""
    (to_0,), (to_1,) = (plan.steps for plan in _plans([[16], [2, 3, 11], [4, 12]], 2))
    assert [(pair.queries.first_row, pair.queries.start, pair.queries.stop) for pair in to_0.received] == [
        (0, 4, 8),
        (1, 4, 8),
        (2, 4, 8),
    ]
    assert [(keys.first_row, keys.start, keys.stop) for keys in to_0.received_keys] == [(0, 0, 8), (1, 1, 8), (2, 0, 8)]
    assert [(keys.first_row, keys.start, keys.stop) for keys in to_1.received_keys] == [(0, 0, 4), (1, 2, 4)]
    assert [(pair.queries.start, pair.queries.stop) for pair in to_1.received] == [(0, 8), (0, 1)]
    nothing = _plans([[4, 8, 4]], 2)
    assert [step.received for plan in nothing for step in plan.steps] == [(), ()]


def test_neighbouring_rows_that_are_alike_are_one_pair():
    """One call of a kernel for all of them. That with two documents is alike where keys of rank 1 are met."""
    (to_0,), (to_1,) = (plan.steps for plan in _plans([[16], [16], [2, 14], [16]], 2))
    assert [(pair.queries.first_row, pair.queries.num_rows) for pair in to_0.received] == [(0, 4)]
    assert [(pair.keys.first_row, pair.keys.num_rows) for pair in to_1.received] == [(0, 2), (2, 1), (3, 1)]
    (whole,), _ = (plan.steps for plan in _plans([[16]] * 5, 2))
    assert [pair.queries.num_tokens for pair in whole.received] == [5 * 4]


@pytest.mark.parametrize("size", [2, 4])
def test_borders_on_the_device_are_those_of_the_plan(size):
    rows = ROWS["short documents"]
    padded = torch.from_numpy(np.append(_borders(rows), [144] * 5).astype(np.int32))
    for rank, plan in enumerate(_plans(rows, size)):
        borders = share_borders(padded, seq_len=48, rank=rank, size=size)
        lengths = borders.diff()
        assert borders.dtype == torch.int32 and borders[0] == 0
        assert tuple(lengths[lengths != 0].tolist()) == plan.documents
