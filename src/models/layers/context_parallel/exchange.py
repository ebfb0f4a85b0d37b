"""The collective under context parallelism by heads: every rank gives every other one piece."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group


# One operator that compiled graphs call as it is: neither broken at the collective nor blind to its gradient.
@torch.library.custom_op("oneloop::exchange", mutates_args=())
def exchange(pieces: Tensor, group_name: str) -> Tensor:
    """All-to-all of equal pieces. Differentiable any number of times: its transpose is itself. No host sync.

    Args:
        pieces: (ranks, ...); pieces[r] goes to rank r of the group.
        group_name: `ProcessGroup.group_name`, since operators take no groups.

    Returns:
        A contiguous tensor of that shape; [r] is what rank r had for this one.
    """
    received = torch.empty(pieces.shape, dtype=pieces.dtype, device=pieces.device)
    group = _resolve_process_group(group_name)  # pyright: ignore[reportArgumentType]: a type of its own for the name
    dist.all_to_all_single(received, pieces.contiguous(), group=group)
    return received


@exchange.register_fake
def _(pieces: Tensor, group_name: str) -> Tensor:
    return torch.empty(pieces.shape, dtype=pieces.dtype, device=pieces.device)


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group_name = inputs[1]


def _transposed(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return exchange(gradient, ctx.group_name), None


exchange.register_autograd(_transposed, setup_context=_keep_group)
