"""Layers on the meta device, where there are shapes and no values: what they would keep in memory on a GPU.

Left to torch, attention on the meta device would be the plain products, whose memory grows with the square of the row.
"""

import torch
from torch import Tensor


@torch.library.custom_op("oneloop::attention_outline", mutates_args=())
def attention_outline(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes of fused attention: its result, like `query`, and the log-sum-exp that its backward pass reads.

    Args:
        query: (rows, seq_len, heads, head_dim)
        key: (rows, seq_len, kv heads, head_dim)
        value: likewise.
    """
    return _outline(query)


@attention_outline.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return _outline(query)


def _outline(query: Tensor) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("oneloop::attention_outline_backward", mutates_args=())
def _attention_outline_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Tensor, log_sum_exp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@_attention_outline_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Tensor, log_sum_exp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _attention_outline_backward(grad, *ctx.saved_tensors)  # type: ignore[attr-defined]


attention_outline.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("oneloop::norm_outline", mutates_args=())
def norm_outline(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes of a fused RMSNorm: its result, like `hidden` (..., size), and the inverse root of each mean square."""
    return _norm_outline(hidden)


@norm_outline.register_fake
def _(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _norm_outline(hidden)


def _norm_outline(hidden: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)


def _norm_backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    hidden, weight, _ = ctx.saved_tensors  # type: ignore[attr-defined]
    return torch.empty_like(hidden), torch.empty_like(weight)


def _keep_norm(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]
) -> None:
    ctx.save_for_backward(*inputs, output[1])


norm_outline.register_autograd(_norm_backward, setup_context=_keep_norm)
