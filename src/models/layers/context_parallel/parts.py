"""What attention over a part of the keys takes and gives, and how such parts become one: by the log-sum-exp of their
scores (Milakov and Gimelshein 2018, arXiv:1805.02867)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend


class Kernel(StrEnum):
    """What computes."""

    CUDNN = "cudnn"
    """The fastest where SDPA picks it, but it takes tens of milliseconds to prepare each new shape."""

    FLASH = "flash"
    PLAIN = "plain"
    """Matrix products."""


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

    kernel: Kernel


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


def choose_kernel(query: Tensor, key: Tensor, value: Tensor, *, whole_rows: bool) -> Kernel:
    """
    Args:
        query: (rows, positions, heads, head_dim)
        key: (rows, positions, kv heads, head_dim)
        value: likewise.
        whole_rows: every row is one document, so shapes are the same in every batch.
    """
    head_dim = query.size(-1)
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > 256:
        return Kernel.PLAIN
    if whole_rows:
        # As attention of one rank does: SDPA knows which kernels this device has, and which one may be used now.
        q, k, v = (heads.transpose(1, 2) for heads in (query, key, value))
        grouped = q.size(1) != k.size(1)
        choice = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=grouped)  # pyright: ignore[reportPrivateImportUsage]
        if choice == SDPBackend.CUDNN_ATTENTION.value:
            return Kernel.CUDNN
    return Kernel.FLASH


def join_(out: Tensor, lse: Tensor, part: Attended) -> None:
    """Add the attention over further keys to that over others, in place.

    Args:
        out: (rows, queries, heads, head_dim), in `sum_dtype`.
        lse: (rows, heads, queries), likewise.
        part: of the same queries.
    """
    weight = torch.sigmoid(part.lse - lse).transpose(1, 2).unsqueeze(-1)
    out.mul_(1 - weight).addcmul_(part.out, weight)
    torch.logaddexp(lse, part.lse, out=lse)
