"""Which process this is, what it computes on, and whom it shares the batch with."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks of a run."""

    device: torch.device
    rank: int
    world_size: int
    dp_rank: int
    """Data rank: which part of a global batch this process reads."""

    dp_size: int
    device_mesh: DeviceMesh | None
    """None at one rank."""

    host_group: dist.ProcessGroup | None
    """gloo group of its own for the checkpoint writer, whose thread must not mix its collectives with the step's."""

    def sum_(self, values: Tensor) -> Tensor:
        """Add `values` up over data ranks, in place; nothing to do at one."""
        if self.dp_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM)
        return values

    def max_(self, values: Tensor) -> Tensor:
        """Take the largest of each of `values` over data ranks, in place."""
        if self.dp_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


def one_rank_mesh(device: torch.device) -> Mesh:
    """The mesh of a process that is alone."""
    return Mesh(device=device, rank=0, world_size=1, dp_rank=0, dp_size=1, device_mesh=None, host_group=None)


def build_mesh(timeout_seconds: int) -> Mesh:
    """Join the process group that the launcher described in the environment.

    Args:
        timeout_seconds: a collective that takes longer raises.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if world_size == 1:
        return one_rank_mesh(device)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    host_group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(host_group, dist.ProcessGroup)  # something else only on ranks outside of it
    return Mesh(
        device=device,
        rank=rank,
        world_size=world_size,
        dp_rank=rank,
        dp_size=world_size,
        device_mesh=init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp_shard",)),
        host_group=host_group,
    )
