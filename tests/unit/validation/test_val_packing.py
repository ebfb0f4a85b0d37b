import numpy as np
import pytest

from trainer.validation.packing import pack
from trainer.validation.windows import cut_windows


def test_windows_of_each_document_are_disjoint_and_start_at_its_first_token() -> None:
    windows = cut_windows(np.array([5, 6, 14]), 4, prefix=False)
    # documents [0, 5), [5, 6), [6, 14): windows 0-4, 4-5 (one token: nothing to score), 5-6 (the same), 6-10, 10-14
    assert windows.starts.tolist() == [0, 6, 10]
    assert windows.num_inputs.tolist() == [3, 3, 3]
    assert windows.num_unscorable == 1


def test_with_a_prefix_every_window_is_scored_whole() -> None:
    windows = cut_windows(np.array([5, 6, 14]), 4, prefix=True)
    assert windows.starts.tolist() == [0, 4, 5, 6, 10]
    assert windows.num_inputs.tolist() == [4, 1, 1, 4, 4]
    assert windows.num_unscorable == 0


def test_best_fit_decreasing_by_hand() -> None:
    rows = pack(np.array([2, 7, 3, 5, 3]), 8)
    # 7 | 5 + 3 | 3 + 2: the first 3 fills the row of 5 exactly
    assert [rows.windows_of(row).tolist() for row in range(rows.num_rows)] == [[1], [2, 3], [0, 4]]


@pytest.mark.parametrize("capacity", [8, 64])
def test_every_window_lies_in_one_row_and_rows_hold_what_they_can(capacity: int) -> None:
    lengths = np.random.default_rng(0).integers(1, capacity + 1, 500)
    rows = pack(lengths, capacity)
    packed = [rows.windows_of(row) for row in range(rows.num_rows)]
    assert sorted(np.concatenate(packed).tolist()) == list(range(500))
    assert max(lengths[row].sum() for row in packed) <= capacity
    # best-fit decreasing needs at most 11/9 of the fewest possible rows (+ 1)
    assert rows.num_rows <= 11 / 9 * np.ceil(lengths.sum() / capacity) + 1
