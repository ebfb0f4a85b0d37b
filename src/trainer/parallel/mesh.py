"""Which process this is, what it computes on, and whom it shares the batch with."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

WATCHDOG_SECONDS = 15
"""What the launcher gets to find out which rank hangs: torch ends the ranks that wait for it, not that one."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks of a run, and this process's place among them.

    Ranks are numbered by replica, then by shard of the weights, then by share of a row: rank = (replica * dp_shard +
    shard) * cp_size + cp_rank. So ranks that share rows, and ranks that share weights, are neighbours.
    """

    device: torch.device
    rank: int
    world_size: int
    dp_rank: int
    """Data rank: which rows of a global batch this process reads, together with the others of its `cp_group`."""

    dp_size: int
    """dp_replicate x dp_shard"""

    dp_replicate: int = 1
    """Replicas of the weights."""

    cp_rank: int = 0
    """Which share of its rows this process computes."""

    cp_size: int = 1

    device_mesh: DeviceMesh | None
    """Over which the weights lie: (dp_shard_cp,), or (dp_replicate, dp_shard_cp) with replicas; None at one rank."""

    cp_group: dist.ProcessGroup | None = None
    """The ranks that share rows; None where none do."""

    host_group: dist.ProcessGroup | None
    """gloo group of its own for the checkpoint writer, whose thread must not mix its collectives with the step's."""

    @property
    def counts_rows(self) -> bool:
        """Whether what the host knows of rows (their tokens, digests) is this rank's to count: one of those that share
        the rows does. What the device computes, each counts for its own share."""
        return self.cp_rank == 0

    @property
    def is_first_replica(self) -> bool:
        """Whether what is equal on all replicas (shards of weights) is this rank's to count."""
        return self.rank < self.world_size // self.dp_replicate

    def sum_(self, values: Tensor) -> Tensor:
        """Add `values` up over all ranks, in place; nothing to do at one."""
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM)
        return values

    def max_(self, values: Tensor) -> Tensor:
        """Take the largest of each of `values` over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


def one_rank_mesh(device: torch.device) -> Mesh:
    """The mesh of a process that is alone."""
    return Mesh(device=device, rank=0, world_size=1, dp_rank=0, dp_size=1, device_mesh=None, host_group=None)


def build_mesh(timeout_seconds: int, *, dp_replicate: int = 1, cp: int = 1) -> Mesh:
    """Join the process group that the launcher described in the environment.

    Args:
        timeout_seconds: a collective that takes WATCHDOG_SECONDS longer raises.
        dp_replicate: replicas of the weights.
        cp: ranks that share each row; dp_replicate x cp divides the number of ranks.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if int(os.environ["WORLD_SIZE"]) == 1:
        return one_rank_mesh(device)
    timeout = timedelta(seconds=timeout_seconds + WATCHDOG_SECONDS)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    host_group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(host_group, dist.ProcessGroup)  # something else only on ranks outside of it
    return lay_out_ranks(device, host_group, dp_replicate=dp_replicate, cp=cp)


def lay_out_ranks(device: torch.device, host_group: dist.ProcessGroup, *, dp_replicate: int, cp: int) -> Mesh:
    """The mesh of the ranks of the process group that was joined. Collective; other arguments as in `build_mesh`.

    Args:
        device: what this rank computes on.
        host_group: see Mesh.

    Raises:
        ValueError: dp_replicate x cp does not divide the number of ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size % (dp_replicate * cp):
        raise ValueError(f"{world_size} ranks are not a multiple of {dp_replicate} replicas x {cp} shares of a row")
    replicas = ((dp_replicate, "dp_replicate"),) if dp_replicate > 1 else ()
    sizes, names = zip(*replicas, (world_size // dp_replicate, "dp_shard_cp"), strict=True)
    cp_group = None
    if cp > 1:
        rows = init_device_mesh(device.type, (world_size // cp, cp), mesh_dim_names=("dp", "cp"))
        cp_group = rows.get_group("cp")
    return Mesh(
        device=device,
        rank=rank,
        world_size=world_size,
        dp_rank=rank // cp,
        dp_size=world_size // cp,
        dp_replicate=dp_replicate,
        cp_rank=rank % cp,
        cp_size=cp,
        device_mesh=init_device_mesh(device.type, sizes, mesh_dim_names=names),
        cp_group=cp_group,
        host_group=host_group,
    )
