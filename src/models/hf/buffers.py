"""Values of the buffers of transformers' models (RoPE frequencies, scales), which building on the meta device skips.

They are computed once, on the CPU, by the rule that `from_pretrained` uses: the model's own `_init_weights`. So they
have the same bits on every rank and device, in the dtype that the model gave them.
"""

import copy

import torch
from torch import Tensor, nn

from models.errors import ArchError


def buffer_values(model: nn.Module) -> dict[str, Tensor]:
    """All buffers by name, on the CPU.

    Args:
        model: a PreTrainedModel, on any device.

    Raises:
        ArchError: there is no rule for one.
    """
    values: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if any(buffer is not None for buffer in module._buffers.values()):
            filled = _filled(model, module)
            for name, buffer in filled.items():
                full_name = f"{path}.{name}" if path else name
                if buffer.is_floating_point() and bool(buffer.isnan().any()):
                    raise ArchError("model_type", f"transformers has no rule for the values of {full_name}")
                values[full_name] = buffer
    return values


def _filled(model: nn.Module, module: nn.Module) -> dict[str, Tensor]:
    """The module's own buffers, by the model's rule. Parameters stay where they are: on meta, nothing is drawn."""
    clone = copy.copy(module)
    with torch.device("cpu"), torch.no_grad():
        clone._buffers = {name: _unset(buffer) for name, buffer in module._buffers.items() if buffer is not None}
        clone._parameters = {
            name: None if parameter is None else nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            for name, parameter in module._parameters.items()
        }
        model._init_weights(clone)  # type: ignore[operator]
    return {name: buffer for name, buffer in clone._buffers.items() if buffer is not None}


def _unset(buffer: Tensor) -> Tensor:
    value = torch.nan if buffer.is_floating_point() else 77
    return torch.full(buffer.shape, value, dtype=buffer.dtype, device="cpu")


def restore_buffers(model: nn.Module, values: dict[str, Tensor], device: torch.device) -> None:
    """Put the values in, on `device`."""
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        # A clone: some models write into their buffers.
        model.get_submodule(path)._buffers[leaf] = value.clone().to(device)


def freeze_rope(model: nn.Module) -> None:
    """Keep RoPE at its first frequencies: within the lengths that models.hf.refusals allows they never change, and
    looking whether they must makes the host wait for the GPU."""
    for module in model.modules():
        if getattr(module, "rope_type", None) in ("dynamic", "longrope"):
            module.rope_type = "default"  # type: ignore[assignment]
