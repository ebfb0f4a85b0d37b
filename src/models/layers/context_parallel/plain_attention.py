"""Attention over a part of the keys by plain matrix products, a block of queries at a time: any device and dtype, and
the oracle of the kernels."""

from collections.abc import Iterator

import torch
from torch import Tensor

from models.layers.context_parallel.parts import Attended, Heads, sum_dtype

# Scores of one block of queries: 256 MiB in fp32.
_BLOCK_ELEMENTS = 2**26


def plain_forward(heads: Heads, *, causal: bool) -> Attended:
    """
    Args:
        heads: rows of queries, each with its keys.
        causal: a query meets the keys up to its own position; else all.

    Returns:
        All in `sum_dtype`.
    """
    value = _by_group(heads.value, heads.key.size(2))
    outs, lses = [], []
    for block in _blocks(heads):
        scores, _ = _scores(heads, block, causal)
        lse = scores.logsumexp(-1, keepdim=True)
        outs.append((scores.sub_(lse).exp_() @ value).permute(0, 3, 1, 2, 4).flatten(2, 3))
        lses.append(lse.squeeze(-1).flatten(1, 2))
    return Attended(out=torch.cat(outs, 1), lse=torch.cat(lses, 2))


def plain_backward(heads: Heads, grad: Tensor, total: Attended, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query, key and value that come by these keys, in their dtypes.

    Args:
        heads: as in forward.
        grad: (rows, queries, heads, head_dim) by the attention over all keys.
        total: the attention over all keys, of which these are a part.
        causal: as in forward.
    """
    num_kv_heads = heads.key.size(2)
    key, value = _by_group(heads.key, num_kv_heads), _by_group(heads.value, num_kv_heads)
    by_key, by_value = torch.zeros_like(key), torch.zeros_like(value)
    by_query = []
    for block in _blocks(heads):
        scores, query = _scores(heads, block, causal)
        lse = total.lse[:, :, block].unflatten(1, (num_kv_heads, -1)).unsqueeze(-1)
        weights = scores.sub_(lse).exp_()
        block_grad = _by_group(grad[:, block], num_kv_heads)
        share = (block_grad * _by_group(total.out[:, block], num_kv_heads)).sum(-1, keepdim=True)
        by_score = (block_grad @ value.transpose(-1, -2)).sub_(share).mul_(weights).mul_(heads.scale)
        by_query.append((by_score @ key).permute(0, 3, 1, 2, 4).flatten(2, 3))
        by_key += (by_score.transpose(-1, -2) @ query).sum(2, keepdim=True)
        by_value += (weights.transpose(-1, -2) @ block_grad).sum(2, keepdim=True)
    of_keys = [tensor.squeeze(2).transpose(1, 2).to(heads.key.dtype) for tensor in (by_key, by_value)]
    return torch.cat(by_query, 1).to(heads.query.dtype), of_keys[0], of_keys[1]


def _blocks(heads: Heads) -> Iterator[slice]:
    """Queries whose scores are held at a time."""
    rows, queries, num_heads, _ = heads.query.shape
    size = max(1, _BLOCK_ELEMENTS // (rows * num_heads * heads.key.size(1)))
    return (slice(start, min(start + size, queries)) for start in range(0, queries, size))


def _by_group(heads: Tensor, num_kv_heads: int) -> Tensor:
    """(rows, queries, heads, d) -> (rows, kv heads, heads per kv head, queries, d) in `sum_dtype`."""
    return heads.to(sum_dtype(heads.dtype)).unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)


def _scores(heads: Heads, block: slice, causal: bool) -> tuple[Tensor, Tensor]:
    """(rows, kv heads, heads per kv head, queries, keys) of a block of queries, and the queries, grouped alike."""
    key = _by_group(heads.key, heads.key.size(2))
    query = _by_group(heads.query[:, block], heads.key.size(2))
    scores = query @ key.transpose(-1, -2) * heads.scale
    if causal:
        positions = torch.arange(heads.query.size(1), device=scores.device)
        scores.masked_fill_(positions > positions[block, None], float("-inf"))
    return scores, query
