"""Attention over a part of the keys by the kernels under SDPA and varlen attention: CUDA, bfloat16 or float16.

Called as operators, because only these take what the backward pass over a part needs: the output and the log-sum-exp of
the attention over all keys.
"""

import torch
from torch import Tensor

from models.layers.context_parallel.parts import Attended, Documents, Heads, Kernel


def dense_forward(heads: Heads, *, causal: bool) -> Attended:
    """Rows of queries, each with its keys. `out` has the dtype of the queries, `lse` is fp32."""
    q, k, v = heads.query, heads.key, heads.value
    if heads.kernel is Kernel.FLASH:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.size(1), k.size(1), 0.0, causal, False, scale=heads.scale
        )
        return Attended(out=out, lse=lse)
    by_heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *by_heads, None, True, 0.0, causal, False, scale=heads.scale
    )
    return Attended(out=out.transpose(1, 2), lse=lse.squeeze(-1))


def dense_backward(heads: Heads, grad: Tensor, total: Attended, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query, key and value that come by these keys; `grad` and `total` are of the attention over all."""
    q, k, v, lse = heads.query, heads.key, heads.value, total.lse.contiguous()
    if heads.kernel is Kernel.FLASH:
        none = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # state of a dropout that there is not
        return torch.ops.aten._flash_attention_backward(
            *(grad, q, k, v, total.out, lse, None, None, q.size(1), k.size(1), 0.0, causal, none, none),
            scale=heads.scale,
        )
    none = torch.zeros((), dtype=torch.int64, device=grad.device)
    by_heads = (tensor.transpose(1, 2) for tensor in (grad, q, k, v, total.out))
    by_query, by_key, by_value = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(*by_heads, lse.unsqueeze(-1), none, none, None, None, None, q.size(1), k.size(1), 0.0, causal),
        scale=heads.scale,
    )
    return by_query.transpose(1, 2), by_key.transpose(1, 2), by_value.transpose(1, 2)


def varlen_forward(heads: Heads, documents: Documents) -> Attended:
    """Causal within each document, by flash attention."""
    shape, longest = heads.query.shape, max(documents.lengths)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(tensor.flatten(0, 1) for tensor in (heads.query, heads.key, heads.value)),
        *(documents.cu_seqlens, documents.cu_seqlens, longest, longest, 0.0, True, False),
        scale=heads.scale,
    )
    return Attended(out=out.view(shape), lse=lse.unflatten(1, shape[:2]).transpose(0, 1))


def varlen_backward(heads: Heads, grad: Tensor, total: Attended, documents: Documents) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `varlen_forward`; see `dense_backward`."""
    none, longest = torch.zeros(2, dtype=torch.uint64, device=grad.device), max(documents.lengths)
    by_query, by_key, by_value = torch.ops.aten._flash_attention_backward(
        *(tensor.flatten(0, 1) for tensor in (grad, heads.query, heads.key, heads.value, total.out)),
        total.lse.transpose(0, 1).flatten(1).contiguous(),
        *(documents.cu_seqlens, documents.cu_seqlens, longest, longest, 0.0, True, none, none),
        scale=heads.scale,
    )
    return by_query.view(heads.query.shape), by_key.view(heads.key.shape), by_value.view(heads.value.shape)
