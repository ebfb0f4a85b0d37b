"""Pieces into rows: best fit, in order, one each."""

from itertools import pairwise

import numpy as np
import pytest

from trainer.data.packing import PackedRows, by_length, one_each, pack, pack_in_order


def _rows(packed: PackedRows) -> list[list[int]]:
    return [packed.pieces_of(row).tolist() for row in range(packed.num_rows)]


def _best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """Free positions of the rows, sorted: piece by piece, by the definition."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    return sorted(rooms)


def test_best_fit_decreasing_by_hand() -> None:
    # 7 | 5 + 3 | 3 + 2: the first 3 fills the row of 5 exactly
    assert _rows(pack(np.array([2, 7, 3, 5, 3]), 8)) == [[1], [2, 3], [0, 4]]


def test_in_order_by_hand() -> None:
    assert _rows(pack_in_order(np.array([2, 7, 3, 5, 3, 8, 1]), 8)) == [[0], [1], [2, 3], [4], [5], [6]]
    assert _rows(pack_in_order(np.array([3, 3, 2, 1]), 8)) == [[0, 1, 2], [3]]


def test_one_each_by_hand() -> None:
    assert _rows(one_each(3)) == [[0], [1], [2]]


@pytest.mark.parametrize("capacity", [8, 64, 70_000])
def test_every_piece_lies_in_one_row_and_rows_hold_what_they_can(capacity: int) -> None:
    lengths = np.random.default_rng(0).integers(1, capacity + 1, 500)
    packed = pack(lengths, capacity)
    rows = _rows(packed)
    assert sorted(np.concatenate(rows).tolist()) == list(range(500))
    assert max(lengths[row].sum() for row in rows) <= capacity
    # best-fit decreasing needs at most 11/9 of the fewest possible rows (+ 1)
    assert packed.num_rows <= 11 / 9 * np.ceil(lengths.sum() / capacity) + 1


def test_it_is_best_fit_decreasing() -> None:
    """Placing all pieces of a length together leaves what placing them one by one leaves."""
    generator = np.random.default_rng(1)
    for capacity in range(1, 121, 2):
        lengths = generator.integers(1, generator.integers(1, capacity + 1), 150, endpoint=True)
        packed = pack(lengths, capacity)
        left = [capacity - int(lengths[row].sum()) for row in _rows(packed)]
        assert sorted(left) == _best_fit_decreasing(lengths.tolist(), capacity)


def test_in_order_flushes_when_the_next_does_not_fit() -> None:
    lengths = np.random.default_rng(2).integers(1, 33, 400)
    rows = _rows(pack_in_order(lengths, 32))
    assert np.concatenate(rows).tolist() == list(range(400))
    assert max(lengths[row].sum() for row in rows) <= 32
    assert all(lengths[row].sum() + lengths[after[0]] > 32 for row, after in pairwise(rows))


def test_by_length_is_stable() -> None:
    lengths = np.array([3, 70_000, 3, 5, 70_000])
    for capacity in (70_000, 1 << 40):
        assert by_length(lengths, capacity).tolist() == [1, 4, 3, 0, 2]
    assert by_length(lengths % 7, 7).tolist() == [3, 0, 2, 1, 4]
