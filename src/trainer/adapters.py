"""`[model.lora]`: adapters in a model, what checkpoints say about them, whether a run can go on with those of one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from configs.errors import ConfigError, Fault
from configs.model import LoRAConfig, ModelConfig
from models.base import CausalLM
from models.errors import AdapterError
from models.lora import apply_lora
from trainer.checkpoint import ModelRecord
from trainer.weights.adapter_files import AdapterRecord
from trainer.weights.fingerprint import fingerprint
from trainer.weights.folder import open_weights

_SAME = ("rank", "alpha", "target_modules", "modules_to_save")
"""Fields of `[model.lora]` that say what the numbers of an adapter mean."""


def apply_adapters(config: LoRAConfig, model: CausalLM, *, compute_dtype: torch.dtype) -> None:
    """Give a meta-device model the adapters that `[model.lora]` asks for.

    Raises:
        ConfigError: it names something that cannot be adapted.
    """
    try:
        apply_lora(
            model,
            rank=config.rank,
            alpha=config.alpha,
            dropout=config.dropout,
            target_modules=config.target_modules,
            modules_to_save=config.modules_to_save,
            seed=config.seed,
            frozen_dtype=compute_dtype,
        )
    except AdapterError as error:
        raise ConfigError.one(f"model.lora.{error.key}", error.message) from error


def adapter_record(config: ModelConfig, folder: Path | None) -> AdapterRecord | None:
    """What checkpoints say about adapters and the base that they belong to; None for a run without adapters.

    Args:
        folder: of `model.name`, with its weights.

    Raises:
        ConfigError: the weights are missing or damaged.
        RunError: a file of them is damaged.
    """
    if config.lora is None:
        return None
    has_base = config.takes_weights_of_name
    assert folder is not None or not has_base, "ModelConfig asks for model.name"
    # A folder by its full path: exports are used from elsewhere.
    base = str(folder.absolute()) if folder is not None and folder == Path(str(config.name)) else config.name
    return AdapterRecord(
        rank=config.lora.rank,
        alpha=config.lora.alpha,
        dropout=config.lora.dropout,
        target_modules=config.lora.target_modules,
        modules_to_save=config.lora.modules_to_save,
        base=base if has_base else None,
        fingerprint=fingerprint(open_weights(folder)) if has_base and folder is not None else None,
    )


def setting_faults(config: ModelConfig, state: dict[str, Any], path: Path) -> Iterator[Fault]:
    """Why a run with this `[model.lora]`, or without one, cannot go on with the tensors of a checkpoint.

    Args:
        state: of the checkpoint at `path`.

    Raises:
        RunError: it does not say which model it is of.
    """
    saved, own = ModelRecord.of(state).adapters, config.lora
    if saved is None and own is None:
        return
    if saved is None:
        message = f"{path} holds a whole model, no adapters: leave the table out, or export it and name it model.name"
        yield Fault(key="model.lora", message=message)
        return
    if own is None:
        message = f"is missing: {path} holds adapters of {saved.base}, not a whole model (export-hf --merge makes one)"
        yield Fault(key="model.lora", message=message)
        return
    for key in _SAME:
        then, now = getattr(saved, key), getattr(own, key)
        if (set(then) != set(now)) if isinstance(then, list) else (then != now):
            yield Fault(key=f"model.lora.{key}", message=f"{now} here, and {then} in {path}: other adapters")


def base_faults(own: AdapterRecord | None, state: dict[str, Any], path: Path) -> Iterator[Fault]:
    """Whether the base is the one that the adapters of a checkpoint were trained beside.

    Args:
        own: of this run.
        state: of the checkpoint at `path`.
    """
    saved = ModelRecord.of(state).adapters
    if saved is not None and own is not None and saved.fingerprint != own.fingerprint:
        yield Fault(
            key="model.name",
            message=f"the weights of {own.base} are not those that the adapters of {path} were trained beside "
            f"({saved.base}): their fingerprint is {own.fingerprint}, not {saved.fingerprint}",
        )


def check_resumed(config: ModelConfig, own: AdapterRecord | None, state: dict[str, Any], path: Path) -> None:
    """Check that a run can go on from the checkpoint at `path`, with adapters or without. Arguments as above.

    Raises:
        ConfigError: it cannot.
        RunError: the checkpoint does not say which model it is of.
    """
    faults = [*setting_faults(config, state, path), *base_faults(own, state, path)]
    if faults:
        raise ConfigError(faults)
