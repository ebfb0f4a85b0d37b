"""Whether to stop in the middle of a long piece of work: agreed by all ranks, without making any of them wait."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.parallel.mesh import Mesh

_MAX_UNDER_WAY = 4
"""Votes cast and not yet counted. The host may be this many units of work ahead of the device, so that the device
always has something to do; and a stop is heeded this many units after it was asked for."""


@dataclass(frozen=True, kw_only=True)
class _Vote:
    result: Tensor
    """(1,) float32 in host memory, valid once counted: some rank wants to stop."""

    work: dist.Work
    ready: "torch.cuda.Event | None"

    def count(self) -> bool:
        if self.ready is not None:
            self.ready.synchronize()  # deliberate: for work that was enqueued _MAX_UNDER_WAY units ago
        else:
            self.work.wait()
        return bool(self.result.item())


class StopVotes:
    """One vote per unit of work, such as a forward pass.

    Signals reach ranks at different moments, and a rank that left alone would hang the others in their next
    collective. So each unit enqueues an all-reduce of the flags, and its result is looked at a few units later, at the
    same unit on every rank. At one rank the flag itself counts, at once.
    """

    def __init__(self, mesh: Mesh, requested: Callable[[], bool]) -> None:
        """
        Args:
            mesh: the ranks; they must vote equally often.
            requested: whether this rank was asked to stop; must never go back.
        """
        self._mesh = mesh
        self._requested = requested
        self._under_way: deque[_Vote] = deque()

    def cast(self) -> bool:
        """Vote before a unit of work. True, on every rank at the same unit: leave the work here."""
        if self._mesh.world_size == 1:
            return self._requested()
        self._under_way.append(self._enqueue())
        return len(self._under_way) > _MAX_UNDER_WAY and self._under_way.popleft().count()

    def settle(self) -> bool:
        """Count the votes under way, after the work or after leaving it: whether any rank wants to stop."""
        if self._mesh.world_size == 1:
            return self._requested()
        asked = False
        while self._under_way:
            asked |= self._under_way.popleft().count()
        return asked

    def _enqueue(self) -> _Vote:
        on_cuda = self._mesh.device.type == "cuda"
        flag = torch.tensor([float(self._requested())], pin_memory=on_cuda).to(self._mesh.device, non_blocking=True)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None  # it is None only with async_op=False
        if not on_cuda:
            return _Vote(result=flag, work=work, ready=None)
        work.wait()  # orders the copy behind it on the device; the host goes on
        result = torch.empty(1, pin_memory=True)
        result.copy_(flag, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return _Vote(result=result, work=work, ready=ready)
