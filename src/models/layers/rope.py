"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout of Hugging Face checkpoints.

Nothing is stored: the table is computed from `position_ids` in every forward pass, once for all layers. A buffer of
inverse frequencies would be left uninitialised by meta-device building and rounded by `model.to(bfloat16)`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595): every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling: frequencies that turn fewer than `low_freq_factor` times within
    `original_max_position_embeddings` positions are divided by `factor`, those that turn more than `high_freq_factor`
    times are kept, and between the two the change is gradual (linear in the number of turns)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): frequency i is kept up to `ramp_start`, divided by `factor` from
    `ramp_end`, gradually between; cosines and sines are multiplied by `attention_factor`."""

    factor: float
    ramp_start: float
    ramp_end: float
    attention_factor: float


@dataclass(frozen=True, kw_only=True)
class Rope:
    """What decides the table."""

    head_dim: int
    """Even."""

    theta: float
    """Base of the wavelengths."""

    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None


def rope_frequencies(rope: Rope, device: torch.device) -> Tensor:
    """(head_dim / 2,) float64 radians per position: `theta ** (-2 i / head_dim)`, scaled."""
    # In fp64 and by exp, so that CPU and GPU round to the same fp32 frequencies.
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float64, device=device)
    frequencies = torch.exp(exponents * (-math.log(rope.theta) / rope.head_dim))
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Llama3Scaling(factor=factor) as scaling:
            turns = frequencies * (scaling.original_max_position_embeddings / (2 * math.pi))
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        case YarnScaling(factor=factor) as scaling:
            kept = (scaling.ramp_end - exponents / 2) / (scaling.ramp_end - scaling.ramp_start)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def rope_table(position_ids: Tensor, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the phases `position * frequency`.

    Args:
        position_ids: (rows, seq_len) int64.
        rope: head dimension, base and scaling.
        dtype: float64 in float64 runs, else float32: a phase in bf16 would be off by radians after a few hundred
            positions.

    Returns:
        Two tensors (rows, seq_len, 1, head_dim / 2) of `dtype`.
    """
    frequencies = rope_frequencies(rope, position_ids.device).to(dtype)
    phases = position_ids.to(dtype)[..., None] * frequencies  # (rows, seq_len, head_dim / 2)
    cos, sin = phases.cos()[:, :, None], phases.sin()[:, :, None]
    if isinstance(rope.scaling, YarnScaling):
        return cos * rope.scaling.attention_factor, sin * rope.scaling.attention_factor
    return cos, sin


def apply_rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of every head.

    Args:
        heads: (rows, seq_len, heads, head_dim), any float dtype.
        cos: from `rope_table`; the rotation is computed in its dtype.
        sin: likewise.

    Returns:
        A tensor like `heads`.
    """
    first, second = heads.to(cos.dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(heads.dtype)
