"""Ring attention (Liu et al. 2023, arXiv:2310.01889) over packed documents: keys and values go round, queries stay.

Every rank has two chunks of each row, one from its beginning and one from its end, so that all have equally much to do
under a causal mask. Any number of heads will do. The passes are in ring_passes, who meets whom is in ring_plan.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from models.layers.attention import DocumentContext
from models.layers.context_parallel.base import ContextParallel
from models.layers.context_parallel.parts import Attended, Documents, Heads, choose_kernel, sum_dtype
from models.layers.context_parallel.ring_passes import Share, ring_backward, ring_forward
from models.layers.context_parallel.ring_plan import ring_plan


class Ring(ContextParallel):
    """Shares are two chunks of a row each; attention swaps keys and values."""

    has_own_attention = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        """All ranks of the group must call this at once.

        Args:
            group: the ranks that share rows.
        """
        size = dist.get_world_size(group)
        super().__init__(group, [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)])
        # NCCL wants all ranks in a group's first communication; swaps of keys leave out ranks without any.
        dist.barrier(group)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: DocumentContext) -> Tensor:
        """See ContextParallel.attend."""
        borders = context.cu_seqlens, context.host_cu_seqlens
        return ring_attention(query, key, value, *borders, query.size(-1) ** -0.5, self.group_name)[0]


@dataclass(frozen=True, kw_only=True)
class _Swap:
    """Tensors on their way in both directions."""

    sent: Tensor  # its memory must not be used for anything else until then
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True, kw_only=True)
class _GroupLink:
    """Point-to-point messages of a process group."""

    group: dist.ProcessGroup

    def swap(self, sent: Tensor, target: int, received: Tensor, source: int) -> _Swap:
        operations = []
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=target))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=source))
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Swap(sent=sent, received=received, works=works)


# One operator, so that compiled graphs need not look inside and selective recomputation can keep its result: to attend
# again would be to send everything again.
@torch.library.custom_op("oneloop::ring_attention", mutates_args=())
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    host_cu_seqlens: Tensor,
    scale: float,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Causal attention inside documents, of rows in zigzag shares. No host sync. All ranks of the group must call it.

    Args:
        query: (rows, seq_len / size, heads, head_dim) of this rank's positions.
        key: (rows, seq_len / size, kv heads, head_dim), likewise.
        value: likewise.
        cu_seqlens: (documents or more + 1,) int32 of the whole rows, as in Segments.
        host_cu_seqlens: (documents + 1,) int32, likewise.
        scale: factor of the scores.
        group_name: `ProcessGroup.group_name` of the ranks that share the rows.

    Returns:
        Attention, like `query`, and the log-sum-exp of the scores: (rows, heads, seq_len / size), fp32 or fp64, not
        differentiable.
    """
    share = _share(query, key, value, cu_seqlens, host_cu_seqlens, scale, group_name)
    attended = ring_forward(share)
    return attended.out, attended.lse


@ring_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    host_cu_seqlens: Tensor,
    scale: float,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    rows, positions, num_heads, _ = query.shape
    lse = torch.empty((rows, num_heads, positions), dtype=sum_dtype(query.dtype), device=query.device)
    return torch.empty(query.shape, dtype=query.dtype, device=query.device), lse


@torch.library.custom_op("oneloop::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    host_cu_seqlens: Tensor,
    scale: float,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    share = _share(query, key, value, cu_seqlens, host_cu_seqlens, scale, group_name)
    return ring_backward(share, grad.contiguous(), Attended(out=out, lse=lse))


@_ring_attention_backward.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    host_cu_seqlens: Tensor,
    scale: float,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    like = [torch.empty(heads.shape, dtype=heads.dtype, device=heads.device) for heads in (query, key, value)]
    return like[0], like[1], like[2]


def _share(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    host_cu_seqlens: Tensor,
    scale: float,
    group_name: str,
) -> Share:
    group = _resolve_process_group(group_name)  # pyright: ignore[reportArgumentType]: a type of its own for the name
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    seq_len = query.size(1) * size
    plan = ring_plan(host_cu_seqlens.numpy(), seq_len=seq_len, rank=rank, size=size)
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    kernel = choose_kernel(query, key, value, whole_rows=host_cu_seqlens.numel() == query.size(0) + 1)
    return Share(
        heads=Heads(query=query, key=key, value=value, scale=scale, kernel=kernel),
        documents=Documents(
            lengths=plan.documents, cu_seqlens=share_borders(cu_seqlens, seq_len=seq_len, rank=rank, size=size)
        ),
        plan=plan,
        link=_GroupLink(group=group),
    )


def share_borders(cu_seqlens: Tensor, *, seq_len: int, rank: int, size: int) -> Tensor:
    """Document borders of whole rows -> those in the share of `rank`, likewise int32; documents that it has nothing of
    are empty. See ring_plan.share_index.

    Args:
        cu_seqlens: (documents + 1,) int32
    """
    chunk = seq_len // (2 * size)
    row, position = cu_seqlens // seq_len, cu_seqlens % seq_len
    first = (position - rank * chunk).clamp_(0, chunk)
    second = (position - (2 * size - 1 - rank) * chunk).clamp_(0, chunk)
    return row * (2 * chunk) + first + second


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.group_name = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _ring_attention_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.group_name)
    return *gradients, None, None, None, None


ring_attention.register_autograd(_gradients, setup_context=_keep)

RING_ATTENTION = torch.ops.oneloop.ring_attention.default
"""The operator as it is seen in what it is part of."""
