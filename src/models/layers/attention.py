"""Causal attention inside documents.

Three forms, all exact at document borders because a query never meets a key of another document:

- rows: every row is one document. One `scaled_dot_product_attention` over (rows, seq_len).
- segments: one `scaled_dot_product_attention` per document. Any device and dtype; the loop runs on the host, from
  lengths that the host knows.
- varlen: one `torch.nn.attention.varlen` call for all documents. CUDA, bfloat16 or float16.

The ranks that share rows may have a way of their own (ring attention).
"""

import inspect
from contextlib import nullcontext
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from models.batch import Batch
from models.errors import ArchError
from models.layers.outline import attention_outline


class AttentionForm(StrEnum):
    """How the documents of a batch are attended."""

    ROWS = "rows"
    SEGMENTS = "segments"
    VARLEN = "varlen"
    OWN = "own"
    """That of the ranks that share rows."""


def check_attention(attn: str, head_dim: int) -> None:
    """
    Raises:
        ArchError: there is no such attention for heads of this width.
    """
    if attn not in ("sdpa", "varlen"):
        raise ArchError("", f"attention {attn!r} is not implemented; it is sdpa or varlen")
    if attn == "varlen" and (head_dim % 8 or head_dim > 256):
        raise ArchError("head_dim", f"varlen attention takes multiples of 8 up to 256, not {head_dim}")


# torch 2.11 takes grouped queries as they are; later versions want to be told.
_VARLEN_WANTS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters


class DocumentContext:
    """What attention reads of a batch: the document borders, and the form.

    A plain class on purpose. FSDP casts the float tensors it finds in the arguments of a wrapped block, dataclasses
    included, which would round a RoPE table to bf16; and torch.compile guards every field of a frozen dataclass,
    the ones that differ between batches too, but only the attributes in use of a plain object.
    """

    def __init__(self, batch: Batch, *, attn: str, dtype: torch.dtype) -> None:
        """
        Args:
            batch: on the device of the model.
            attn: "sdpa" or "varlen".
            dtype: of the hidden states.

        Raises:
            ValueError: `attn` cannot run on this device or dtype.
        """
        segments = batch.segments
        self.cu_seqlens = segments.cu_seqlens
        self.host_cu_seqlens = segments.host_cu_seqlens
        self.max_seqlen_carrier = segments.max_seqlen_carrier
        self.lengths: list[int] = []
        if segments.full_rows:
            self.form = AttentionForm.ROWS
        elif attn == "varlen":
            if not batch.input_ids.is_cuda or dtype not in (torch.bfloat16, torch.float16):
                device = batch.input_ids.device.type
                raise ValueError(
                    f'attn = "varlen" needs CUDA and bfloat16, not {device} and {dtype}; use attn = "sdpa"'
                )
            self.form = AttentionForm.VARLEN
        else:
            self.form = AttentionForm.SEGMENTS
            self.lengths = segments.host_cu_seqlens.diff().tolist()  # host numbers: no device sync

    def prepare_compiled(self, fullgraph: bool) -> None:
        """Tell torch.compile that the number of documents and the longest length vary, so it keeps them symbolic.

        Raises:
            ValueError: the form cannot be part of a whole graph.
        """
        if self.form is AttentionForm.OWN:
            torch._dynamo.mark_dynamic(self.cu_seqlens, 0)
            torch._dynamo.mark_dynamic(self.host_cu_seqlens, 0)
        if self.form is AttentionForm.VARLEN:
            torch._dynamo.mark_dynamic(self.cu_seqlens, 0)
            torch._dynamo.mark_dynamic(self.max_seqlen_carrier, 0)
        if fullgraph and self.form is AttentionForm.SEGMENTS:
            raise ValueError(
                'model.compile.fullgraph does not go with attn = "sdpa" on packed documents: its loop over documents '
                'cannot be part of a graph; use attn = "varlen", rows of one document, or fullgraph = false'
            )


def attend(
    query: Tensor, key: Tensor, value: Tensor, context: DocumentContext, *, scale: float | None = None
) -> Tensor:
    """Causal attention inside documents.

    Args:
        query: (rows, seq_len, heads, head_dim)
        key: (rows, seq_len, kv heads, head_dim)
        value: likewise.
        context: of the batch.
        scale: factor of the scores; None is head_dim ** -0.5.

    Returns:
        (rows, seq_len, heads, head_dim)
    """
    if query.is_meta:
        return attention_outline(query, key, value)[0]
    if context.form == AttentionForm.ROWS:
        return _causal_sdpa(query, key, value, scale)
    flat = (query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1))
    if context.form == AttentionForm.VARLEN:
        attended = _varlen(*flat, context.cu_seqlens, context.max_seqlen_carrier.size(0), scale)
    else:
        attended = _attend_segments(*flat, context, scale)  # pyright: ignore[reportCallIssue]: disable() is loose
    return attended.view(query.shape)


def _causal_sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention of (rows, seq_len, heads, head_dim) along seq_len."""
    groups = query.size(2) // key.size(2)
    if query.is_cuda and query.dtype == torch.float32 and groups > 1:
        # No fused fp32 kernel on CUDA takes grouped heads: SDPA would build the seq_len x seq_len matrix.
        key, value = key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)
        groups = 1
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=groups > 1)
    return attended.transpose(1, 2)


# Compiled, the loop would be unrolled for the lengths of one batch and compiled again for those of the next.
@torch.compiler.disable
def _attend_segments(
    query: Tensor, key: Tensor, value: Tensor, context: DocumentContext, scale: float | None
) -> Tensor:
    """Causal attention of (tokens, heads, head_dim), one call per document."""
    # split, not slices: the backward of a slice writes a zero-padded tensor of the whole length, per document.
    documents = zip(*(heads.split(context.lengths) for heads in (query, key, value)), strict=True)
    return torch.cat([_causal_sdpa(q[None], k[None], v[None], scale)[0] for q, k, v in documents])


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float | None
) -> Tensor:
    """Causal attention of (tokens, heads, head_dim) inside cu_seqlens; empty documents at its end are allowed."""
    options: dict[str, Any] = {"enable_gqa": True} if _VARLEN_WANTS_GQA_FLAG else {}
    # Flash attention has a deterministic backward and obeys the global flag; of cuDNN's that is not documented.
    deterministic = torch.are_deterministic_algorithms_enabled()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if deterministic else nullcontext():
        attended = varlen_attn(
            query,
            key,
            value,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            scale=scale,
            window_size=(-1, 0),
            **options,
        )
    assert isinstance(attended, Tensor)  # a pair only when the log-sum-exp is asked for
    return attended
