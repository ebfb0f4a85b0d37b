"""RMSNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467) with a learned gain.

    The mean of squares is taken in fp32 (fp64 for fp64 inputs) whatever the dtype of the input.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., size) -> (..., size), same dtype."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
