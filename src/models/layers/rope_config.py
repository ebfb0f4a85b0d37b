"""From the `rope_parameters` of a Hugging Face config to the RoPE that is computed; the rest is refused.

Field names and defaults are those of transformers 5, which folds the older `rope_theta` and `rope_scaling` into
`rope_parameters` when the config is made.
"""

import math
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from models.errors import ArchError
from models.layers.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling

KEY = "rope_parameters"
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN_FIELDS = ("factor", "original_max_position_embeddings")
_YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_EVERY_FIELD = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# Beyond it, and for NaN, sums and products overflow; Python's integers have no bound of their own.
_LARGE = 1e15
# transformers' yarn reads a 0 in these as "not given".
_DEFAULT_BETA_FAST = 32.0
_DEFAULT_BETA_SLOW = 1.0


def rope_of_config(config: PretrainedConfig, head_dim: int) -> Rope:
    """The RoPE that a config describes.

    Args:
        config: with `rope_parameters`.
        head_dim: width of a head; all of it is rotated.

    Raises:
        ArchError: a type that is not implemented, a field missing, out of range, or unknown to the type.
    """
    parameters: Mapping[str, Any] = config.rope_parameters or {}
    if head_dim < 2 or head_dim % 2:
        raise ArchError("head_dim", f"RoPE needs an even head dimension, 2 or more, not {head_dim}")
    if parameters.get("partial_rotary_factor", 1) not in (None, 1):
        raise ArchError(KEY, "partial_rotary_factor other than 1 is not implemented")
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = _positive(parameters, "rope_theta", rope_type)
    match rope_type:
        case "default":
            # Left by other types, and harmless here: the default RoPE has no scaling to start from.
            _only(parameters, rope_type, "original_max_position_embeddings")
            scaling = None
        case "linear":
            _only(parameters, rope_type, "factor")
            scaling = LinearScaling(factor=_factor(parameters, rope_type))
        case "llama3":
            _only(parameters, rope_type, *_LLAMA3_FIELDS)
            scaling = _llama3(parameters)
        case "yarn":
            _only(parameters, rope_type, *_YARN_FIELDS, *_YARN_OPTIONS)
            scaling = _yarn(parameters, head_dim, theta)
        case _:
            raise ArchError(
                KEY, f"rope_type {rope_type} is not implemented; it is one of default, linear, llama3, yarn"
            )
    return Rope(head_dim=head_dim, theta=theta, scaling=scaling)


def _llama3(parameters: Mapping[str, Any]) -> Llama3Scaling:
    _complete(parameters, "llama3", _LLAMA3_FIELDS)
    factor = _factor(parameters, "llama3")
    _, low, high, original = (_positive(parameters, name, "llama3") for name in _LLAMA3_FIELDS)
    if high <= low:
        raise ArchError(KEY, f"llama3 needs high_freq_factor above low_freq_factor, not {high} and {low}")
    return Llama3Scaling(
        factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position_embeddings=original
    )


def _yarn(parameters: Mapping[str, Any], head_dim: int, theta: float) -> YarnScaling:
    _complete(parameters, "yarn", _YARN_FIELDS)
    factor = _factor(parameters, "yarn")
    original = _positive(parameters, "original_max_position_embeddings", "yarn")
    if theta <= 1:
        raise ArchError(KEY, f"yarn needs a rope_theta above 1, not {theta}")
    beta_fast = _option(parameters, "beta_fast") or _DEFAULT_BETA_FAST
    beta_slow = _option(parameters, "beta_slow") or _DEFAULT_BETA_SLOW
    if beta_fast < beta_slow:
        raise ArchError(KEY, f"yarn needs beta_fast not below beta_slow, not {beta_fast} and {beta_slow}")

    def frequency_with(turns: float) -> float:
        """Index (fractional) of the frequency that turns so many times within the original length."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    start, end = frequency_with(beta_fast), frequency_with(beta_slow)
    if parameters.get("truncate", True):
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, head_dim - 1)
    if start == end:
        end += 0.001  # a step is a ramp this steep
    return YarnScaling(
        factor=factor, ramp_start=start, ramp_end=end, attention_factor=_attention_factor(parameters, factor)
    )


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """The given one; else DeepSeek's ratio where both its fields are there; else that of the paper, section 3.4."""
    given = _option(parameters, "attention_factor")
    if given is not None:
        if not given:
            raise ArchError(KEY, "yarn needs an attention_factor above 0")
        return given
    mscale, mscale_all_dim = _option(parameters, "mscale"), _option(parameters, "mscale_all_dim")
    log_factor = 0.1 * math.log(factor)
    if mscale and mscale_all_dim:
        return (mscale * log_factor + 1) / (mscale_all_dim * log_factor + 1)
    return log_factor + 1


def _only(parameters: Mapping[str, Any], rope_type: str, *fields: str) -> None:
    unknown = sorted(set(parameters) - {*fields, *_EVERY_FIELD})
    if unknown:
        raise ArchError(KEY, f"the {rope_type} RoPE has no {', '.join(unknown)}")


def _complete(parameters: Mapping[str, Any], rope_type: str, fields: tuple[str, ...]) -> None:
    missing = [name for name in fields if parameters.get(name) is None]
    if missing:
        raise ArchError(KEY, f"the {rope_type} RoPE needs {', '.join(missing)}")


def _factor(parameters: Mapping[str, Any], rope_type: str) -> float:
    factor = _positive(parameters, "factor", rope_type)
    if factor < 1:
        raise ArchError(KEY, f"factor of the {rope_type} RoPE must be at least 1, not {factor}")
    return factor


def _positive(parameters: Mapping[str, Any], name: str, rope_type: str) -> float:
    if parameters.get(name) is None:
        raise ArchError(KEY, f"the {rope_type} RoPE needs {name}")
    value = _number(parameters, name)
    if value <= 0:
        raise ArchError(KEY, f"{name} must be above 0, not {value}")
    return value


def _option(parameters: Mapping[str, Any], name: str) -> float | None:
    if parameters.get(name) is None:
        return None
    value = _number(parameters, name)
    if value < 0:
        raise ArchError(KEY, f"{name} must not be negative, not {value}")
    return value


def _number(parameters: Mapping[str, Any], name: str) -> float:
    value = parameters[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGE:
        raise ArchError(KEY, f"{name} must be a number, not {value!r}")
    return float(value)
