"""Ranks that are asked to stop at different moments leave their work at the same unit."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.parallel.mesh import one_rank_mesh
from trainer.parallel.stop_votes import StopVotes

NEVER = 99
ONE_RANK = one_rank_mesh(torch.device("cpu"))


class Reduction:
    """Of one vote: the result is there once it was waited for."""

    def __init__(self, flag: Tensor, others_flag: float) -> None:
        self._flag, self._others_flag = flag, others_flag

    def wait(self) -> None:
        self._flag.clamp_(min=self._others_flag)


@pytest.fixture
def take_part(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, int], tuple[int, bool, int]]:
    """Work of some units on one of two ranks, by the units at which it and the other are asked to stop. Gives the
    units done, what `settle` said, and the votes cast."""

    def work(num_units: int, asked: int, other_asked: int) -> tuple[int, bool, int]:
        done = cast = 0

        def all_reduce(flag: Tensor, op: dist.ReduceOp.RedOpType, async_op: bool) -> Reduction:
            nonlocal cast
            assert op == dist.ReduceOp.MAX and async_op
            cast += 1
            return Reduction(flag, float(cast - 1 >= other_asked))

        monkeypatch.setattr("trainer.parallel.stop_votes.dist.all_reduce", all_reduce)
        votes = StopVotes(replace(ONE_RANK, world_size=2), lambda: done >= asked)
        while done < num_units and not votes.cast():
            done += 1
        return done, votes.settle(), cast

    return work


@pytest.mark.parametrize(
    ("asked", "other_asked", "units"), [(3, NEVER, 7), (NEVER, 3, 7), (0, 5, 4), (5, 0, 4), (15, NEVER, 19)]
)
def test_both_leave_at_the_same_unit(take_part, asked: int, other_asked: int, units: int) -> None:
    """Four units after the first was asked; whoever leaves has voted as often as the other."""
    assert take_part(20, asked, other_asked) == (units, True, units + 1)
    assert take_part(20, other_asked, asked) == (units, True, units + 1)


@pytest.mark.parametrize(("num_units", "asked"), [(1, 0), (4, 0), (4, 3), (20, 16), (20, 19)])
def test_asked_too_late_to_leave(take_part, num_units: int, asked: int) -> None:
    """The work is done, and both know of the wish when it is."""
    assert take_part(num_units, asked, NEVER) == (num_units, True, num_units)
    assert take_part(num_units, NEVER, asked) == (num_units, True, num_units)


@pytest.mark.parametrize("num_units", [0, 3, 20])
def test_nobody_asks(take_part, num_units: int) -> None:
    assert take_part(num_units, NEVER, NEVER) == (num_units, False, num_units)


def test_one_rank_leaves_at_once() -> None:
    asked = False
    votes = StopVotes(ONE_RANK, lambda: asked)
    assert not votes.cast() and not votes.settle()
    asked = True
    assert votes.cast() and votes.settle()
