"""What a config or model of transformers asks for that cannot be computed exactly inside documents: refused by name.

These checks name the field at fault. What they do not know of is caught by models.hf.proof.
"""

import re
from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from models.errors import ArchError

_EXPERTS = re.compile(r"(^|_)experts?(_|$)")
_DROPOUT = re.compile(r"drop")
_OTHER_HEADS = ("classifier_dropout", "summary_first_dropout", "summary_last_dropout", "hidden_dropout_prob_classifier")
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window", "local_attention")
_FULL_WINDOWS = ("full_attention", "sliding_attention")
_ROPE_THAT_CHANGES = ("dynamic", "longrope")


def refuse_config(config: PretrainedConfig, *, seq_len: int) -> None:
    """Check what the config shows.

    Args:
        config: of a causal language model of transformers.
        seq_len: longest row.

    Raises:
        ArchError: the first fault, with the config's field.
    """
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if family is None:
        raise ArchError("model_type", f"{config.model_type!r} is unknown, here and as a decoder of transformers")
    if config.sub_configs:
        raise ArchError("model_type", f"{config.model_type} is composed of several models: not implemented")
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ArchError("is_encoder_decoder", "only decoders without cross-attention are implemented")
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        raise ArchError("is_causal", "its attention is not causal")
    if not getattr(family, "_supports_attention_backend", False):
        raise ArchError(
            "model_type",
            f"transformers computes the attention of {config.model_type} in a way of its own, in which documents meet",
        )
    values = config.to_dict()
    _refuse_fields(values)
    _refuse_windows(config, seq_len)
    _refuse_changing_rope(values, seq_len)


def _refuse_fields(values: dict[str, Any]) -> None:
    for key, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if _EXPERTS.search(key) and is_number and value > 1:
            raise ArchError(key, f"mixtures of experts are not implemented ({value})")
        if _DROPOUT.search(key) and is_number and value > 0 and key not in _OTHER_HEADS:
            raise ArchError(key, f"dropout is not implemented: set it to 0 (it is {value})")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "attn_logit_softcap"):
        if values.get(key):
            raise ArchError(key, f"soft-capping is not implemented ({values[key]})")
    if values.get("alibi"):
        raise ArchError("alibi", "position biases are not implemented")


def _refuse_windows(config: PretrainedConfig, seq_len: int) -> None:
    layer_types = getattr(config, "layer_types", None)
    for layer_type in layer_types or []:
        if layer_type not in _FULL_WINDOWS:
            raise ArchError("layer_types", f"layers of type {layer_type} are not implemented")
    if layer_types is not None and set(layer_types) == {"full_attention"}:
        return
    if getattr(config, "use_sliding_window", True) is False:
        return
    for key in _WINDOWS:
        window = getattr(config, key, None)
        if isinstance(window, int) and not isinstance(window, bool) and 0 < window < seq_len:
            raise ArchError(key, f"{window} is shorter than seq_len = {seq_len}: not implemented")


def _refuse_changing_rope(values: dict[str, Any], seq_len: int) -> None:
    """`dynamic` and `longrope` change all frequencies with the longest document of a batch once that exceeds a limit:
    documents would act on each other."""
    parameters = values.get("rope_parameters") or {}
    nested = [entry for entry in parameters.values() if isinstance(entry, dict)]
    for entry in nested or [parameters]:
        rope_type = entry.get("rope_type")
        if rope_type not in _ROPE_THAT_CHANGES:
            continue
        limit = entry.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
        limit = limit or values["max_position_embeddings"]
        if seq_len > limit:
            raise ArchError(
                "rope_parameters",
                f"beyond {limit} positions {rope_type} changes with the longest document of a batch: not implemented "
                f"for seq_len = {seq_len}",
            )
        if nested:
            raise ArchError("rope_parameters", f"{rope_type} of its own for a layer type is not implemented")


def refuse_model(model: nn.Module, config: PretrainedConfig, *, seq_len: int) -> None:
    """Check what the built model shows.

    Args:
        model: transformers' model, on any device.
        config: its.
        seq_len: longest row.

    Raises:
        ArchError: the first fault.
    """
    family = config.model_type
    for name, parameter in model.named_parameters():
        if parameter.dim() > 2:
            raise ArchError(
                "model_type", f"{family} has {name} of {parameter.dim()} dimensions (experts, convolutions): refused"
            )
    stored = set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if stored:
        raise ArchError("model_type", f"{family} stores {sorted(stored)[0]}, which is no parameter: not implemented")
    positions = getattr(config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ArchError("", f"dropout is not implemented ({name} of {family} has {module.p})")
        is_table = isinstance(module, nn.Embedding) and module is not model.get_input_embeddings()  # type: ignore[operator]
        if is_table and min(module.num_embeddings, positions or seq_len) < seq_len:
            raise ArchError(
                "max_position_embeddings",
                f"{family} has learned positions up to {positions or module.num_embeddings}, fewer than "
                f"seq_len = {seq_len}",
            )
        for buffer_name, buffer in module.named_buffers(recurse=False):
            if positions is not None and buffer.dim() > 1 and positions in buffer.shape and positions < seq_len:
                raise ArchError(
                    "max_position_embeddings",
                    f"{family} has a table of {positions} positions ({name}.{buffer_name}), fewer than "
                    f"seq_len = {seq_len}",
                )
