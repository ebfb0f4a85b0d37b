"""A small model of the same architecture: all layers and switches of a config, narrow widths and few ids."""

from typing import Any

from transformers import PretrainedConfig

from models.errors import ArchError
from models.hf_config import SPECIAL_IDS, config_from_dict, config_to_dict

VOCAB_SIZE = 64
_HEADS = 4
_HEAD_DIM = 16
_INTERMEDIATE = 48


def small_twin(config: PretrainedConfig) -> PretrainedConfig:
    """The config with small sizes.

    The number of layers stays, since layers can differ; heads keep how queries are grouped. What depends on the head's
    width by a list (RoPE factors) keeps that width.

    Raises:
        ArchError: its class refuses the sizes.
    """
    names = config.attribute_map
    try:
        values = config_to_dict(config)
        hidden_size, num_heads = config.hidden_size, config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or hidden_size // num_heads
    except Exception as error:  # what a class raises for a field that differs from layer to layer, or is missing
        raise ArchError("model_type", f"{config.model_type} has no heads of one width that its config tells") from error
    if not _has_lists(values.get("rope_parameters")):
        head_dim = _HEAD_DIM
    sizes: dict[str, int | None] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HEADS * head_dim,
        "num_attention_heads": _HEADS,
        "intermediate_size": _INTERMEDIATE,
        "head_dim": head_dim,
        "num_key_value_heads": _kv_heads(getattr(config, "num_key_value_heads", None), num_heads),
        **dict.fromkeys(SPECIAL_IDS, 1),
    }
    for key, size in sizes.items():
        name = names.get(key, key)
        if values.get(name) is not None:
            values[name] = size
    # Fields that must be equal to the width.
    for name, value in values.items():
        if value == hidden_size and name.endswith(("_dim", "_size")) and name not in sizes:
            values[name] = sizes["hidden_size"]
    try:
        return config_from_dict(values)
    except ArchError as error:
        raise ArchError("", f"a small {config.model_type} for the check cannot be made: {error.message}") from error


def _kv_heads(kv_heads: int | None, num_heads: int) -> int | None:
    if kv_heads is None:
        return None
    return {1: 1, num_heads: _HEADS}.get(kv_heads, _HEADS // 2)


def _has_lists(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_lists(entry) for entry in value.values())
    return isinstance(value, list)
