"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) beside frozen weights: the layers of the library peft, in our
models.

peft wraps a linear layer and so renames its parameters; `CausalLM.canonical_parameters` gives them back the names of
Hugging Face's files, and an adapter those of peft's files: `<layer>.lora_A.weight` and `<layer>.lora_B.weight`.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from models.base import CausalLM, InitRule
from models.errors import AdapterError
from models.layers.dropout import DropoutKeys

_ADAPTER = "default"
_SUFFIXES = (".lora_A.weight", ".lora_B.weight")


def apply_lora(
    model: CausalLM,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    target_modules: Sequence[str],
    modules_to_save: Sequence[str],
    seed: int,
    frozen_dtype: torch.dtype,
) -> None:
    """Give linear layers an adapter each and freeze everything else, in place. Before compile and sharding.

    Args:
        model: on any device. Adapters have the dtype of its parameters, and values that are to be set.
        rank: of the adapters.
        alpha: their output is scaled by alpha / rank.
        dropout: share of their inputs that is set to 0 in training.
        target_modules: linear layers, by the end of their names.
        modules_to_save: modules that are trained whole, by the end of their names.
        seed: of dropout.
        frozen_dtype: of the frozen parameters from here on: that in which they compute, as no update needs more.

    Raises:
        AdapterError: a name matches nothing, or something that cannot be adapted or trained.
    """
    # Imports accelerate and more, which takes a second.
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    layers = _linear_layers(model, target_modules)
    whole = _whole_modules(model, modules_to_save, layers)
    scale: Any = alpha  # declared int, used as a factor
    config = LoraConfig(r=rank, lora_alpha=scale, lora_dropout=dropout, target_modules=layers)
    inject_adapter_in_model(config, model)

    adapted: dict[str, Any] = {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}
    assert list(adapted) == layers, "peft adapts the layers that it is given"
    model.wrapped_names = {
        f"{path}.{inner}": f"{path}.{_canonical(inner)}"
        for path, module in adapted.items()
        for inner, _ in module.named_parameters()
    }
    trained = tuple(f"{module}." for module in whole)
    for name, parameter in model.canonical_parameters().items():
        parameter.requires_grad_(is_adapter(name) or name.startswith(trained))
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(frozen_dtype)
    if dropout:
        model.dropout = DropoutKeys(len(adapted), seed=seed)
        for module, layer in zip(adapted.values(), model.dropout.layers(dropout), strict=True):
            module.lora_dropout[_ADAPTER] = layer


def is_adapter(name: str) -> bool:
    """Whether the canonical name is that of a matrix of an adapter."""
    return name.endswith(_SUFFIXES)


def adapter_names(weight: str) -> tuple[str, str]:
    """Canonical names of the matrices A (rank, inputs) and B (outputs, rank) of the adapter beside a weight."""
    down, up = _SUFFIXES
    layer = weight.removesuffix(".weight")
    return layer + down, layer + up


def adapter_rules(model: CausalLM) -> dict[str, InitRule]:
    """Rules of the adapters' first values, by canonical name, for models.init: A is uniform with the bound of peft,
    1 / sqrt(inputs); B is 0, so that the model begins as it was."""
    down, up = _SUFFIXES
    rules: dict[str, InitRule] = {}
    for name, parameter in model.canonical_parameters().items():
        if name.endswith(down):
            rules[name] = partial(_uniform, bound=1 / math.sqrt(parameter.shape[1]))
        elif name.endswith(up):
            rules[name] = _zeros
    return rules


def _uniform(generator: np.random.Generator, count: int, bound: float) -> np.ndarray:
    return (generator.random(count, dtype=np.float32) * 2 - 1) * np.float32(bound)


def _zeros(generator: np.random.Generator, count: int) -> np.ndarray:
    return np.zeros(count, np.float32)


def _canonical(inner: str) -> str:
    """The name of a parameter below its layer, without the wrapper."""
    if inner.startswith("base_layer."):
        return inner.removeprefix("base_layer.")
    matrix, adapter, leaf = inner.split(".")
    assert adapter == _ADAPTER, inner
    return f"{matrix}.{leaf}"


def _linear_layers(model: CausalLM, ends: Sequence[str]) -> list[str]:
    """Names of the layers that get an adapter, in the model's order."""
    vocabulary = {id(matrix) for matrix in model.vocabulary_matrices}
    modules = dict(model.named_modules())
    # The head makes the loss from its weight itself, so an adapter's output would never get there.
    linear = {
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and not any(id(p) in vocabulary for p in module.parameters())
    }
    for end in ends:
        found = [name for name in modules if _ends(name, end)]
        others = [name for name in found if name not in linear]
        if others:
            raise AdapterError(
                "target_modules",
                f'"{end}" is {others[0]}, no linear layer of a block; adapters go beside {_last_names(linear)}, and '
                "model.lora.modules_to_save trains other modules whole",
            )
        if not found:
            raise AdapterError("target_modules", f'"{end}" is no linear layer; there are {_last_names(linear)}')
    return [name for name in modules if any(_ends(name, end) for end in ends)]


def _whole_modules(model: CausalLM, ends: Sequence[str], layers: Sequence[str]) -> list[str]:
    """Names of the modules that are trained whole."""
    modules = {name: module for name, module in model.named_modules() if name}
    with_weights = {name for name, module in modules.items() if list(module.parameters(recurse=False))}
    tied = {id(matrix) for matrix in model.vocabulary_matrices} if model.tied_names else set()
    heads = {name.rpartition(".")[0] for name in model.tied_names}
    whole = []
    for end in ends:
        found = [name for name in modules if _ends(name, end)]
        if not found:
            known = _last_names(with_weights)
            raise AdapterError("modules_to_save", f'"{end}" is no module; with weights there are {known}')
        for name in found:
            parameters = list(modules[name].parameters())
            if name in heads or any(id(parameter) in tied for parameter in parameters):
                raise AdapterError(
                    "modules_to_save",
                    f'"{end}" is {name}, and embedding and head are one matrix here (tie_word_embeddings): a copy that '
                    "is trained would untie them; leave it out",
                )
            if not parameters:
                raise AdapterError("modules_to_save", f'"{end}" is {name}, which has no weights')
            inside = [layer for layer in layers if layer == name or layer.startswith(f"{name}.")]
            if inside:
                raise AdapterError(
                    "modules_to_save",
                    f'"{end}" is {name}, where model.lora.target_modules puts an adapter: {inside[0]}',
                )
        whole += found
    return whole


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _last_names(names: set[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names})) or "none"
