"""From `[optim]` to an optimizer."""

from torch import Tensor

from configs.optim import AdamWConfig
from trainer.optim.adamw import AdamW, AdamWBase
from trainer.optim.offloaded_adamw import OffloadedAdamW


def build_optimizer(
    config: AdamWConfig, masters: dict[str, Tensor], num_dims: dict[str, int], *, offload: bool = False
) -> AdamWBase:
    """The optimizer of the master weights (see AdamWBase for the arguments).

    Args:
        offload: keep its moments in host memory.
    """
    return (OffloadedAdamW if offload else AdamW)(config, masters, num_dims)
