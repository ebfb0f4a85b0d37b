"""`[optim]` and `[scheduler]`."""

from typing import Annotated, Literal

from pydantic import Field

from configs.base import BaseConfig
from configs.errors import Fault

DecayRate = Annotated[float, Field(ge=0, lt=1)]


class AdamWConfig(BaseConfig):
    """`[optim]`: AdamW, fused."""

    type: Literal["adamw"] = "adamw"

    lr: float = Field(default=3e-4, ge=0)
    """Peak learning rate."""

    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled decay, on matrices only (embeddings included); norms, biases and other 1-D parameters have none."""

    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay rates of the two moments."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""

    max_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm. None: not clipped."""


class SchedulerBase(BaseConfig):
    """What the schedules with phases share. Steps count from 0; a number below 1 is a fraction of the run's steps."""

    warmup_steps: int | float = Field(default=0, ge=0)
    """Steps of linear warm-up, (s + 1) / warmup_steps; 0 starts at the peak."""

    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate of the last step, and of any step past it."""

    def phases(self) -> dict[str, int | float]:
        """The lengths of the phases, as given."""
        return {"warmup_steps": self.warmup_steps}

    def table_faults(self) -> list[Fault]:
        faults = []
        for key, length in self.phases().items():
            if isinstance(length, float) and length >= 1:
                message = f"{length} is neither a count (a whole number) nor a fraction of the run (a number below 1)"
                faults.append(Fault(key=key, message=message))
        return faults


class ConstantSchedulerConfig(BaseConfig):
    """The peak learning rate at every step."""

    type: Literal["constant"] = "constant"


class LinearSchedulerConfig(SchedulerBase):
    """Warm-up, stable, decay (WSD)."""

    type: Literal["linear"] = "linear"

    decay_steps: int | float = Field(default=0, ge=0)
    """Steps of the final decay to min_lr; 0 holds the peak to the end."""

    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """Shape of the decay."""

    def phases(self) -> dict[str, int | float]:
        return {"warmup_steps": self.warmup_steps, "decay_steps": self.decay_steps}


class CosineSchedulerConfig(SchedulerBase):
    """Warm-up, then half a cosine down to min_lr at the last step."""

    type: Literal["cosine"] = "cosine"


SchedulerConfig = Annotated[
    ConstantSchedulerConfig | LinearSchedulerConfig | CosineSchedulerConfig, Field(discriminator="type")
]
