"""How rows are dealt to forward passes and ranks."""

import numpy as np
import pytest

from trainer.validation.deal import PADDING_ROW, deal


def test_a_hand_worked_example() -> None:
    costs = np.array([5, 9, 1, 7, 3, 7])
    dealt = deal(costs, rows_per_forward=2, dp_size=2)
    # by cost: rows 1, 3, 5, 0, 4, 2; the second of two hands goes round the other way
    assert dealt.tolist() == [[[1, 0], [3, 5]], [[4, PADDING_ROW], [2, PADDING_ROW]]]
    assert dealt.dtype == np.int64


def test_one_rank_reads_from_the_dearest_row_to_the_cheapest() -> None:
    assert deal(np.array([1.0, 3.0, 2.0]), rows_per_forward=2, dp_size=1).tolist() == [[[1, 2]], [[0, PADDING_ROW]]]


def test_rows_of_equal_cost_keep_their_order() -> None:
    costs = np.arange(300) % 3
    (((*rows,),),) = deal(costs, rows_per_forward=300, dp_size=1).tolist()
    assert rows == [*range(2, 300, 3), *range(1, 300, 3), *range(0, 300, 3)]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("rows_per_forward", [1, 2, 5])
@pytest.mark.parametrize("num_rows", [1, 7, 64, 1000])
def test_each_row_once_and_ranks_finish_together(num_rows: int, rows_per_forward: int, dp_size: int) -> None:
    costs = np.random.default_rng(0).lognormal(0, 1, num_rows)
    dealt = deal(costs, rows_per_forward=rows_per_forward, dp_size=dp_size)
    assert dealt.shape == (-(-num_rows // (rows_per_forward * dp_size)), dp_size, rows_per_forward)
    rows = dealt[dealt != PADDING_ROW]
    assert sorted(rows.tolist()) == list(range(num_rows))
    loads = np.append(costs, 0)[dealt].sum(axis=(0, 2))
    assert loads.max() - loads.min() <= 1.01 * costs.max(), "never further apart than by one row"
    # in every pass too: what a rank waits for the others there is less than the dearest row of the pass
    per_pass = np.append(costs, 0)[dealt].sum(axis=2)
    assert (np.ptp(per_pass, axis=1) <= np.append(costs, 0)[dealt].max(axis=(1, 2)) + 1e-12).all()


def test_no_rows_no_passes() -> None:
    assert deal(np.zeros(0), rows_per_forward=2, dp_size=2).shape == (0, 2, 2)
