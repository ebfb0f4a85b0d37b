"""Per-step behaviour beside the optimizer: small objects called at fixed points, before the host reads anything."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from models.base import CausalLM


@dataclass(frozen=True, kw_only=True)
class HookContext:
    """What a hook may see. Tensors are on the device and equal on every rank; reading one would stall the step."""

    model: CausalLM
    step: int
    """Index of the step, from 0."""

    update_ok: Tensor
    """() bool: the optimizer updates in this step."""

    gradients: dict[str, Tensor]
    """This rank's part of the clipped gradients by parameter name."""


class Hook(Protocol):
    """A hook. `state_dict` is what a checkpoint keeps of it, as JSON."""

    def before_optimizer_step(self, context: HookContext) -> None: ...

    def after_optimizer_step(self, context: HookContext) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
