"""What a dense config may ask for that this implementation does not do: refused, never ignored."""

from transformers import PretrainedConfig

from models.errors import ArchError
from models.layers.attention import check_attention


def refuse_unsupported(config: PretrainedConfig, *, seq_len: int, attn: str, head_dim: int) -> None:
    """Check that the dense decoder computes what the config describes. RoPE: see models.layers.rope_config.

    `max_position_embeddings` is not checked: no RoPE here has a table that ends.

    Args:
        config: of a dense family.
        seq_len: longest row.
        attn: "sdpa" or "varlen".
        head_dim: width of a head.

    Raises:
        ArchError: the first fault, with the config's field.
    """
    if config.num_attention_heads % config.num_key_value_heads:
        raise ArchError(
            "num_key_value_heads",
            f"num_attention_heads = {config.num_attention_heads} is not a multiple of {config.num_key_value_heads}",
        )
    if config.hidden_act not in ("silu", "swish"):
        raise ArchError("hidden_act", f"only silu is implemented, not {config.hidden_act}")
    if not 0 <= config.rms_norm_eps < 1:
        raise ArchError("rms_norm_eps", f"must be at least 0 and below 1, not {config.rms_norm_eps}")
    if config.attention_dropout:
        raise ArchError("attention_dropout", f"dropout is not implemented ({config.attention_dropout})")
    if getattr(config, "pretraining_tp", None) not in (None, 1):
        raise ArchError("pretraining_tp", f"only 1 is implemented, not {config.pretraining_tp}")
    if config.chunk_size_feed_forward:
        raise ArchError("chunk_size_feed_forward", f"only 0 is implemented, not {config.chunk_size_feed_forward}")
    _check_windows(config, seq_len)
    check_attention(attn, head_dim)


def _check_windows(config: PretrainedConfig, seq_len: int) -> None:
    """A query sees the `sliding_window` keys up to its own, so a window that is not shorter than the row cuts none."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or []
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ArchError("layer_types", f"{layer_type} is not implemented")
    slides = "sliding_attention" in layer_types or getattr(config, "use_sliding_window", False)
    if slides and window is None:
        raise ArchError("sliding_window", "layers with a sliding window need its length")
    # In mistral a window applies to every layer; elsewhere to those that layer_types names.
    applies = config.model_type == "mistral" or "sliding_attention" in layer_types
    if applies and window is not None and window < seq_len:
        raise ArchError("sliding_window", f"{window} is shorter than seq_len = {seq_len}: not implemented")
