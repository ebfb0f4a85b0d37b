"""Attention over a part of the keys, with what it takes to join such parts: the log-sum-exp of their scores.

Two kinds of parts: rectangles, in which every query meets every key, and documents, causal within each. Two ways to
compute them: a flash attention kernel (CUDA, bfloat16 or float16), and plain matrix products, a block of queries at a
time, which run anywhere in any dtype and are the oracle.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

# Scores of one block of queries: 256 MiB in fp32.
_BLOCK_ELEMENTS = 2**26


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Queries, and the keys and values they meet."""

    query: Tensor
    """(rows, queries, heads, head_dim)"""

    key: Tensor
    """(rows, keys, kv heads, head_dim)"""

    value: Tensor
    """likewise."""

    scale: float
    """Factor of the scores."""

    @property
    def has_kernel(self) -> bool:
        """Whether the flash attention kernel takes these."""
        head_dim = self.query.size(-1)
        fits = head_dim % 8 == 0 and head_dim <= 256
        return self.query.is_cuda and self.query.dtype in (torch.bfloat16, torch.float16) and fits


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What forward found for the queries of a `Heads`."""

    out: Tensor
    """(rows, queries, heads, head_dim)"""

    lse: Tensor
    """(rows, heads, queries), in `sum_dtype`: ln of the sum of exp(scaled score) over the keys."""


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Documents one after the other over all rows; none lies in two rows."""

    lengths: Sequence[int]
    """On the host."""

    cu_seqlens: Tensor
    """(documents or more + 1,) int32, on the device: their borders; empty documents anywhere are allowed."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which parts are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def join_(out: Tensor, lse: Tensor, part: Attended) -> None:
    """Add the attention over further keys to that over others, in place.

    Args:
        out: (rows, queries, heads, head_dim), in `sum_dtype`.
        lse: (rows, heads, queries), likewise.
        part: of the same queries.
    """
    weight = torch.sigmoid(part.lse - lse).transpose(1, 2).unsqueeze(-1)
    out.mul_(1 - weight).addcmul_(part.out, weight.to(out.dtype))
    torch.logaddexp(lse, part.lse, out=lse)


def attend_rectangle(heads: Heads) -> Attended:
    """Every query meets every key. `out` has the dtype of the queries, or `sum_dtype`."""
    if not heads.has_kernel:
        return _plain_forward(heads, causal=False)
    q, k, v = heads.query, heads.key, heads.value
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.size(1), k.size(1), 0.0, False, False, scale=heads.scale
    )
    return Attended(out=out, lse=lse)


def rectangle_gradients(heads: Heads, grad: Tensor, total: Attended) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query, key and value that come by these keys.

    Args:
        heads: as in forward.
        grad: (rows, queries, heads, head_dim) by the attention over all keys.
        total: the attention over all keys, of which these are a part.
    """
    if not heads.has_kernel:
        return _plain_backward(heads, grad, total, causal=False)
    none = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # state of a dropout that there is not
    q, k, v = heads.query, heads.key, heads.value
    return torch.ops.aten._flash_attention_backward(
        *(grad, q, k, v, total.out, total.lse.contiguous(), None, None, q.size(1), k.size(1)),
        *(0.0, False, none, none),
        scale=heads.scale,
    )


def attend_documents(heads: Heads, documents: Documents) -> Attended:
    """Causal within each document; queries and keys have the same positions. See `attend_rectangle`."""
    if heads.has_kernel:
        longest = max(documents.lengths)
        q, k, v = (tensor.flatten(0, 1) for tensor in (heads.query, heads.key, heads.value))
        cu_seqlens = documents.cu_seqlens
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False, scale=heads.scale
        )
        by_rows = lse.unflatten(1, heads.query.shape[:2]).transpose(0, 1)
        return Attended(out=out.view(heads.query.shape), lse=by_rows)
    parts = [_plain_forward(part, causal=True) for part, _ in _by_document(heads, documents)]
    rows, positions = heads.query.shape[:2]
    out = torch.cat([part.out for part in parts], 1).view(heads.query.shape)
    lse = torch.cat([part.lse for part in parts], 2).unflatten(2, (rows, positions))
    return Attended(out=out, lse=lse[0].transpose(0, 1).contiguous())


def document_gradients(
    heads: Heads, grad: Tensor, total: Attended, documents: Documents
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query, key and value that come by the keys of the own share. See `rectangle_gradients`."""
    if heads.has_kernel:
        none = torch.zeros(2, dtype=torch.uint64, device=grad.device)
        longest = max(documents.lengths)
        flat = (tensor.flatten(0, 1) for tensor in (grad, heads.query, heads.key, heads.value, total.out))
        gradients = torch.ops.aten._flash_attention_backward(
            *(*flat, total.lse.transpose(0, 1).flatten(1).contiguous(), documents.cu_seqlens, documents.cu_seqlens),
            *(longest, longest, 0.0, True, none, none),
            scale=heads.scale,
        )
    else:
        lse = total.lse.transpose(0, 1).flatten(1)
        pieces = [
            _plain_backward(
                part,
                grad.flatten(0, 1)[None, where],
                Attended(out=total.out.flatten(0, 1)[None, where], lse=lse[None, :, where]),
                causal=True,
            )
            for part, where in _by_document(heads, documents)
        ]
        gradients = tuple(torch.cat(column, 1)[0] for column in zip(*pieces, strict=True))
    by_query, by_key, by_value = gradients
    return by_query.view(heads.query.shape), by_key.view(heads.key.shape), by_value.view(heads.value.shape)


def _by_document(heads: Heads, documents: Documents) -> Iterator[tuple[Heads, slice]]:
    """Each document as one row, and where it lies in the flattened rows."""
    q, k, v = (tensor.flatten(0, 1) for tensor in (heads.query, heads.key, heads.value))
    for start, stop in pairwise(accumulate(documents.lengths, initial=0)):
        where = slice(start, stop)
        yield Heads(query=q[None, where], key=k[None, where], value=v[None, where], scale=heads.scale), where


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


def _plain_forward(heads: Heads, *, causal: bool) -> Attended:
    value = _by_group(heads.value, heads.key.size(2))
    outs, lses = [], []
    for block in _blocks(heads):
        scores, _ = _scores(heads, block, causal)
        lse = scores.logsumexp(-1, keepdim=True)
        outs.append((scores.sub_(lse).exp_() @ value).permute(0, 3, 1, 2, 4).flatten(2, 3))
        lses.append(lse.squeeze(-1).flatten(1, 2))
    return Attended(out=torch.cat(outs, 1), lse=torch.cat(lses, 2))


def _plain_backward(heads: Heads, grad: Tensor, total: Attended, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
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
