"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout of Hugging Face checkpoints.

Nothing is stored: the table is computed from `position_ids` in every forward pass. A buffer of inverse frequencies
would be left uninitialised by meta-device building and rounded by `model.to(bfloat16)`.
"""

import math

import torch
from torch import Tensor


def rope_table(position_ids: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the phases `position * theta ** (-2 i / head_dim)`.

    Args:
        position_ids: (rows, seq_len) int64.
        head_dim: even.
        theta: base of the wavelengths.
        dtype: float64 in float64 runs, else float32: a phase in bf16 would be off by radians after a few hundred
            positions.

    Returns:
        Two tensors (rows, seq_len, 1, head_dim / 2) of `dtype`.
    """
    # In fp64 and by exp, so that CPU and GPU round to the same fp32 frequencies.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=position_ids.device)
    frequencies = torch.exp(exponents * (-math.log(theta) / head_dim)).to(dtype)
    phases = position_ids.to(dtype)[..., None] * frequencies  # (rows, seq_len, head_dim / 2)
    return phases.cos()[:, :, None], phases.sin()[:, :, None]


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
