"""The two kinds of parts that ring attention is made of: rectangles, in which every query meets every key, and the
documents of a rank's own share, causal within each."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from models.layers.context_parallel.fused_attention import (
    dense_backward,
    dense_forward,
    varlen_backward,
    varlen_forward,
)
from models.layers.context_parallel.parts import Attended, Documents, Heads, Kernel
from models.layers.context_parallel.plain_attention import plain_backward, plain_forward


def attend_rectangle(heads: Heads) -> Attended:
    """Every query meets every key. `out` has the dtype of the queries, or `sum_dtype`."""
    if heads.kernel is Kernel.PLAIN:
        return plain_forward(heads, causal=False)
    return dense_forward(heads, causal=False)


def rectangle_gradients(heads: Heads, grad: Tensor, total: Attended) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query, key and value that come by these keys.

    Args:
        heads: as in forward.
        grad: (rows, queries, heads, head_dim) by the attention over all keys.
        total: the attention over all keys, of which these are a part.
    """
    if heads.kernel is Kernel.PLAIN:
        return plain_backward(heads, grad, total, causal=False)
    return dense_backward(heads, grad, total, causal=False)


def attend_documents(heads: Heads, documents: Documents) -> Attended:
    """Causal within each document; queries and keys have the same positions. See `attend_rectangle`."""
    if heads.kernel is Kernel.CUDNN:
        return dense_forward(heads, causal=True)
    if heads.kernel is Kernel.FLASH:
        return varlen_forward(heads, documents)
    parts = [plain_forward(part, causal=True) for part, _ in _by_document(heads, documents)]
    shape = heads.query.shape
    lse = torch.cat([part.lse for part in parts], 2)[0].unflatten(1, shape[:2])
    return Attended(out=torch.cat([part.out for part in parts], 1).view(shape), lse=lse.transpose(0, 1))


def document_gradients(
    heads: Heads, grad: Tensor, total: Attended, documents: Documents
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query, key and value that come by the keys of the own share. See `rectangle_gradients`."""
    if heads.kernel is Kernel.CUDNN:
        return dense_backward(heads, grad, total, causal=True)
    if heads.kernel is Kernel.FLASH:
        return varlen_backward(heads, grad, total, documents)
    flat_grad, flat_out, flat_lse = grad.flatten(0, 1), total.out.flatten(0, 1), total.lse.transpose(0, 1).flatten(1)
    parts = [
        plain_backward(
            part, flat_grad[None, where], Attended(out=flat_out[None, where], lse=flat_lse[None, :, where]), causal=True
        )
        for part, where in _by_document(heads, documents)
    ]
    by_query, by_key, by_value = (torch.cat(gradients, 1)[0] for gradients in zip(*parts, strict=True))
    return by_query.view(heads.query.shape), by_key.view(heads.key.shape), by_value.view(heads.value.shape)


def _by_document(heads: Heads, documents: Documents) -> Iterator[tuple[Heads, slice]]:
    """Each document as one row, and where it lies in the flattened rows."""
    q, k, v = (tensor.flatten(0, 1) for tensor in (heads.query, heads.key, heads.value))
    for start, stop in pairwise(accumulate(documents.lengths, initial=0)):
        where = slice(start, stop)
        yield replace(heads, query=q[None, where], key=k[None, where], value=v[None, where]), where
