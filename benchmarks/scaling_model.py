"""Time of a training step on many GPUs: the blocks of a model, one after the other, on a compute stream and on links.

The compute of one GPU is a measured step. Everything that more GPUs add follows from sizes: what FSDP2 gathers and
reduces, block by block, and when; what replicas add up; what ranks that share rows exchange. docs/scaling.md has the
formulas in words.
"""

from dataclasses import dataclass
from typing import Literal

BF16, FP32 = 2, 4


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines and what lies between them. Rates in bytes/s, one way; times in s."""

    gpus_per_node: int
    flops_per_second: float
    copy_bytes_per_second: float
    fsdp_copy_bytes_per_second: float
    """Into and out of flat buffers, many tensors at a time."""

    optimizer_seconds_per_parameter: float
    norm_seconds_per_parameter: float
    nvlink_bytes_per_second: float
    """Of one GPU."""

    network_bytes_per_second: float
    """Of one network port."""

    link_efficiency: float
    base_latency: float
    nvlink_latency: float
    network_latency: float
    ports_per_node: int = 8

    @property
    def nvlink(self) -> float:
        """What collectives within a node get."""
        return self.nvlink_bytes_per_second * self.link_efficiency

    @property
    def network(self) -> float:
        """What a collective over whole nodes gets: each node's ports together, or NVLink if that is slower."""
        return min(self.nvlink, self.ports)

    @property
    def ports(self) -> float:
        """What a node's network ports give together."""
        return self.ports_per_node * self.network_bytes_per_second * self.link_efficiency

    def ring(self, num_bytes: float, ranks: int) -> float:
        """An all-gather or reduce-scatter of `num_bytes` in all over neighbouring ranks."""
        if ranks == 1:
            return 0.0
        nodes = -(-ranks // self.gpus_per_node)
        rate = self.nvlink if nodes == 1 else self.network
        hops = (ranks - nodes) * self.nvlink_latency + (nodes - 1) * self.network_latency
        return self.base_latency + hops + num_bytes * (ranks - 1) / ranks / rate

    def all_reduce_over_nodes(self, num_bytes: float, replicas: int, shards: int) -> float:
        """All shards of `num_bytes` in all, each added up over its replicas: as many rings side by side as a node has
        shards."""
        if replicas == 1:
            return 0.0
        crosses = shards * replicas > self.gpus_per_node
        latency = self.network_latency if crosses else self.nvlink_latency
        # Within a node each GPU has links of its own; between nodes all shards of a node share its ports.
        side_by_side = min(shards, self.gpus_per_node)
        rate = self.ports if crosses else self.nvlink * side_by_side
        per_node = num_bytes * side_by_side / shards
        steps = 2 * (replicas - 1)
        return self.base_latency + steps * latency + steps / replicas * per_node / rate

    def exchange(self, num_bytes: float, ranks: int) -> float:
        """`num_bytes` from each rank to the others, all at once."""
        if ranks == 1:
            return 0.0
        crosses = ranks > self.gpus_per_node
        rate = self.network / self.gpus_per_node if crosses else self.nvlink
        return self.base_latency + (self.network_latency if crosses else self.nvlink_latency) + num_bytes / rate


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model."""

    num_blocks: int
    block_params: int
    """Of one block."""

    root_params: int
    """Outside of blocks: embedding, head, last norm."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def params(self) -> int:
        return self.root_params + self.num_blocks * self.block_params


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the GPUs that share a row do for a micro-batch: measured on one GPU, or scaled from that."""

    shape: Shape
    seconds: float
    """Forward and backward pass of one micro-batch on one GPU, optimizer left out."""

    head_share: float
    """Part of it that is the head's."""

    tokens: int
    """Of a micro-batch."""

    attention_share: float
    """Part of it that is attention's, all blocks together."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How ranks are arranged, and what is deferred."""

    gpus: int
    replicas: int = 1
    cp: int = 1
    cp_style: Literal["ulysses", "ring"] = "ulysses"
    micro_batches: int = 1
    defer_grad_sync: bool = False
    defer_replicate_sync: bool = False

    @property
    def shards(self) -> int:
        return self.gpus // self.replicas


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step."""

    total: float
    compute: float
    """Forward and backward passes and optimizer, alone."""

    copies: float
    """FSDP's, into and out of flat buffers."""

    rows_shared: float
    """What ranks that share rows wait for each other."""

    @property
    def exposed(self) -> float:
        """What is waited for gathered weights and reduced gradients."""
        return self.total - self.compute - self.copies - self.rows_shared


def step_time(work: Work, plan: Plan, cluster: Cluster) -> StepTime:
    """Simulate one optimizer step on every rank alike."""
    shape, shards = work.shape, plan.shards
    updated = shape.params / shards if plan.gpus > 1 else shape.params
    optimizer = updated * (cluster.optimizer_seconds_per_parameter + cluster.norm_seconds_per_parameter)
    passes = plan.micro_batches * work.seconds / plan.cp
    if plan.gpus == 1:
        # The copies that the forward pass reads: fp32 read, bf16 written.
        optimizer += shape.params * (FP32 + BF16) / cluster.copy_bytes_per_second
        return StepTime(total=passes + optimizer, compute=passes + optimizer, copies=0.0, rows_shared=0.0)
    streams = _Streams(work, plan, cluster)
    for index in range(plan.micro_batches):
        streams.micro_batch(is_first=index == 0, is_last=index == plan.micro_batches - 1)
    total = streams.end() + optimizer
    return StepTime(total=total, compute=passes + optimizer, copies=streams.copies, rows_shared=streams.rows_shared)


class _Streams:
    """Clocks of a rank: its compute, the links of its shard group, those to its replicas."""

    def __init__(self, work: Work, plan: Plan, cluster: Cluster) -> None:
        self.work, self.plan, self.cluster = work, plan, cluster
        self.compute = self.links = self.replica_links = 0.0
        self.copies = self.rows_shared = 0.0
        seconds = work.seconds / plan.cp
        self._head = work.head_share * seconds
        self._block = (seconds - self._head) / work.shape.num_blocks
        self._shared = {back: shared_rows_seconds(work, plan, cluster, backward=back) for back in (False, True)}

    def micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        """Forward pass, then backward pass; a third and two thirds of the time. The root stays gathered between them,
        and where gradients wait for the last micro-batch everything stays gathered after a backward pass."""
        shape, plan = self.work.shape, self.plan
        gathers = is_first or not plan.defer_grad_sync
        if gathers:
            self._run(0.0, ready=self._gather(shape.root_params, after=self.compute), gathered=shape.root_params)
        ready = self._gather(shape.block_params, after=self.compute) if gathers else 0.0
        for index in range(shape.num_blocks):
            start = max(self.compute, ready)
            current, ready = ready, 0.0
            if gathers and index + 1 < shape.num_blocks:
                ready = self._gather(shape.block_params, after=start)  # the next one's, while this one computes
            self._run(self._block / 3, ready=current, gathered=shape.block_params if gathers else 0)
            self._exchange(backward=False)
        self._run(self._head, ready=0.0)
        ready = self._gather(shape.block_params, after=self.compute)
        for index in range(shape.num_blocks):
            start = max(self.compute, ready)
            current, ready = ready, 0.0
            if index + 1 < shape.num_blocks:
                ready = self._gather(shape.block_params, after=start)
            self._run(2 * self._block / 3, ready=current, gathered=shape.block_params)
            self._exchange(backward=True)
            self._finish(shape.block_params, is_first=is_first, is_last=is_last)
        self._finish(shape.root_params, is_first=is_first, is_last=is_last)

    def end(self) -> float:
        """When all is there that the optimizer needs, and when it knows the norm of the gradients."""
        return max(self.compute, self.links, self.replica_links) + 2 * self.cluster.ring(8, self.plan.gpus)

    def _gather(self, params: int, *, after: float) -> float:
        """Queue an all-gather of weights; gives when they are there."""
        self.links = max(self.links, after) + self.cluster.ring(params * BF16, self.plan.shards)
        return self.links

    def _run(self, seconds: float, *, ready: float, gathered: int = 0) -> None:
        """Compute, once the weights are there and copied out of the buffer that they came in."""
        self.compute = max(self.compute, ready)
        self._wait(self._copy(gathered * 2 * BF16 + gathered / self.plan.shards * (FP32 + BF16)))
        self.compute += seconds

    def _exchange(self, *, backward: bool) -> None:
        """Give and get what the ranks that share rows need of each other."""
        self.rows_shared += self._shared[backward]
        self.compute += self._shared[backward]

    def _finish(self, params: int, *, is_first: bool, is_last: bool) -> None:
        """What becomes of gradients at the end of a backward pass."""
        if self.plan.defer_grad_sync and self.plan.micro_batches > 1:
            # Whole, in fp32: the first are cast, later ones added.
            self._wait(params * (BF16 + (FP32 if is_first else 2 * FP32)) / self.cluster.copy_bytes_per_second)
            if is_last:
                self._reduce(params, FP32, over_replicas=True)
        else:
            self._reduce(params, BF16, over_replicas=is_last or not self.plan.defer_replicate_sync)

    def _reduce(self, params: int, itemsize: int, *, over_replicas: bool) -> None:
        """Queue the sum of gradients: copied into a buffer in fp32, reduced and scattered, added up over replicas."""
        self._wait(self._copy(params * (itemsize + FP32)))
        self.links = max(self.links, self.compute) + self.cluster.ring(params * FP32, self.plan.shards)
        if over_replicas and self.plan.replicas > 1:
            seconds = self.cluster.all_reduce_over_nodes(params * FP32, self.plan.replicas, self.plan.shards)
            self.replica_links = max(self.replica_links, self.links) + seconds

    def _wait(self, copies: float) -> None:
        """Copy on the compute stream."""
        self.copies += copies
        self.compute += copies

    def _copy(self, num_bytes: float) -> float:
        return num_bytes / self.cluster.fsdp_copy_bytes_per_second


def exchanged_bytes(shape: Shape, tokens: int, plan: Plan) -> float:
    """Bytes that a rank sends per block in a forward pass, so that attention sees whole rows.

    Args:
        tokens: of the micro-batch, all shares together; one document per row, which is the most.
    """
    ranks, own = plan.cp, tokens / plan.cp
    if plan.cp_style == "ulysses":
        # Queries and the result, keys and values, each but for the part that stays; few key-value heads are repeated.
        heads = 2 * shape.heads + 2 * max(shape.kv_heads, ranks)
        return BF16 * own * heads * shape.head_dim * (ranks - 1) / ranks
    # Keys and values; in each turn one chunk for the queries of two, or two for those of one. A chunk is half a share.
    return BF16 * (ranks - 1) * 1.5 * own / 2 * 2 * shape.kv_heads * shape.head_dim


def shared_rows_seconds(work: Work, plan: Plan, cluster: Cluster, *, backward: bool) -> float:
    """What a block's forward or backward pass waits for the ranks that share its rows."""
    if plan.cp == 1:
        return 0.0
    num_bytes = exchanged_bytes(work.shape, work.tokens, plan)
    if plan.cp_style == "ulysses":
        return cluster.exchange(num_bytes, plan.cp)  # attention cannot begin before, nor what follows it
    # Backward, keys come once more and their gradients go back. All of it while attention computes with others.
    exchange = cluster.exchange((1 + backward) * num_bytes, plan.cp)
    attention = work.attention_share * work.seconds / plan.cp / work.shape.num_blocks * (1 + backward) / 3
    return max(0.0, exchange - attention * (plan.cp - 1) / plan.cp)
