"""From `[optim]` to an optimizer."""

from torch import Tensor

from configs.optim import AdamWConfig
from trainer.optim.adamw import AdamW


def build_optimizer(config: AdamWConfig, masters: dict[str, Tensor], num_dims: dict[str, int]) -> AdamW:
    """The optimizer of the master weights (see AdamW for the arguments)."""
    return AdamW(config, masters, num_dims)
