"""What a llama or qwen3 config may ask for that this implementation does not do: refused, never ignored."""

from typing import Any

from transformers import PretrainedConfig

from models.errors import ArchError

# Fields that do not change the default RoPE.
_ROPE_FIELDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}


def refuse_unsupported(config: PretrainedConfig, *, seq_len: int, attn: str) -> None:
    """Check that the dense decoder computes what the config describes.

    `max_position_embeddings` is not checked: the default RoPE has no table that ends.

    Args:
        config: a LlamaConfig or Qwen3Config.
        seq_len: longest row.
        attn: "sdpa" or "varlen".

    Raises:
        ArchError: the first fault, with the config's field.
    """
    _check_sizes(config)
    _check_rope(config)
    if config.hidden_act not in ("silu", "swish"):
        raise ArchError("hidden_act", f"only silu is implemented, not {config.hidden_act}")
    if config.attention_dropout:
        raise ArchError("attention_dropout", f"dropout is not implemented ({config.attention_dropout})")
    _check_windows(config, seq_len)
    match attn:
        case "sdpa":
            pass
        case "varlen":
            if config.head_dim % 8 or config.head_dim > 256:
                raise ArchError("head_dim", f"varlen attention takes multiples of 8 up to 256, not {config.head_dim}")
        case _:
            raise ArchError("", f"attention {attn!r} is not implemented; it is sdpa or varlen")


def rope_theta(config: PretrainedConfig) -> float:
    """Base of the RoPE wavelengths."""
    return float(config.rope_parameters["rope_theta"])


def _check_sizes(config: PretrainedConfig) -> None:
    if config.num_attention_heads % config.num_key_value_heads:
        raise ArchError(
            "num_key_value_heads",
            f"num_attention_heads = {config.num_attention_heads} is not a multiple of {config.num_key_value_heads}",
        )
    if config.head_dim % 2:
        raise ArchError("head_dim", f"RoPE needs an even head dimension, not {config.head_dim}")


def _check_rope(config: PretrainedConfig) -> None:
    rope: dict[str, Any] = config.rope_parameters
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ArchError("rope_parameters", f"only rope_type = default is implemented, not {rope_type}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ArchError("rope_parameters", "partial_rotary_factor other than 1 is not implemented")
    unknown = sorted(set(rope) - _ROPE_FIELDS)
    if unknown:
        raise ArchError("rope_parameters", f"the default RoPE has no {', '.join(unknown)}")


def _check_windows(config: PretrainedConfig, seq_len: int) -> None:
    window = getattr(config, "sliding_window", None)
    for layer_type in getattr(config, "layer_types", None) or []:
        if layer_type == "full_attention":
            continue
        if layer_type != "sliding_attention" or window is None:
            raise ArchError("layer_types", f"{layer_type} is not implemented")
        if window < seq_len:
            raise ArchError("sliding_window", f"{window} is shorter than seq_len = {seq_len}: not implemented")
