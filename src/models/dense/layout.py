"""What tells the dense families apart: which biases and norms they have, and which layers rotate."""

from dataclasses import dataclass

from transformers import PretrainedConfig

from models.errors import ArchError


@dataclass(frozen=True, kw_only=True)
class DenseLayout:
    """The parts of a dense decoder that its families have or lack."""

    head_dim: int
    rope_layers: tuple[bool, ...]
    """Per layer: are its queries and keys rotated? Without it a layer knows positions by causality alone (NoPE)."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def dense_layout(config: PretrainedConfig) -> DenseLayout:
    """The layout of a config's family. Where a class leaves a switch out, its family has no choice.

    Raises:
        ArchError: a list with an entry per layer is too short, or the model type is none of the dense ones.
    """
    # qwen2 and smollm3 declare no head_dim, but their models read it where a config has one.
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    every_layer = (True,) * config.num_hidden_layers
    match config.model_type:
        case "llama" | "smollm3":
            return DenseLayout(
                head_dim=head_dim,
                rope_layers=every_layer if config.model_type == "llama" else _smollm3_rope_layers(config),
                qkv_bias=config.attention_bias,
                output_bias=config.attention_bias,
                mlp_bias=config.mlp_bias,
            )
        case "mistral":
            return DenseLayout(head_dim=head_dim, rope_layers=every_layer)
        case "qwen2":
            return DenseLayout(head_dim=head_dim, rope_layers=every_layer, qkv_bias=True)
        case "qwen3":
            bias = config.attention_bias
            return DenseLayout(
                head_dim=head_dim, rope_layers=every_layer, qkv_bias=bias, output_bias=bias, qk_norm=True
            )
        case _:
            raise ArchError("model_type", f"{config.model_type!r} is not a family of the dense decoder")


def _smollm3_rope_layers(config: PretrainedConfig) -> tuple[bool, ...]:
    """From `no_rope_layers`, where (despite its name) 1 means that the layer rotates. The class fills it in."""
    switches = config.no_rope_layers
    if len(switches) < config.num_hidden_layers or any(switch not in (0, 1) for switch in switches):
        raise ArchError(
            "no_rope_layers", f"needs a 0 or 1 for each of the {config.num_hidden_layers} layers, not {switches}"
        )
    return tuple(bool(switch) for switch in switches[: config.num_hidden_layers])
