"""Which families we implement, and how `model.arch` becomes a Hugging Face config and a model."""

import difflib
import re
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from models.base import CausalLM
from models.dense.modeling import DenseForCausalLM
from models.errors import ArchError

__all__ = ["ArchError", "build_config", "build_model"]

_CONFIGS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_FAMILIES: dict[str, Callable[..., CausalLM]] = {"llama": DenseForCausalLM, "qwen3": DenseForCausalLM}

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Accepted by every config class besides its own fields (transformers 5 folds both into rope_parameters).
_ROPE_KEYWORDS = {"rope_theta", "rope_scaling"}
_VOCAB_MULTIPLE = 128


def build_config(
    arch: dict[str, Any], *, tokenizer_length: int | None, special_ids: dict[str, int | None]
) -> PretrainedConfig:
    """The config that `[model.arch]` describes. Nothing is downloaded.

    Args:
        arch: `model_type` and fields of its config class. `vocab_size` defaults to the tokenizer's length rounded up
            to a multiple of 128, special ids to the tokenizer's.
        tokenizer_length: `len(tokenizer)`, or None when there is none.
        special_ids: the tokenizer's bos_token_id, eos_token_id, pad_token_id.

    Raises:
        ArchError: unknown model type or field, a value of the wrong type, a vocabulary smaller than the tokenizer.
    """
    fields = dict(arch)
    model_type = fields.pop("model_type", None)
    config_class = _CONFIGS.get(model_type) if isinstance(model_type, str) else None
    if config_class is None:
        raise ArchError("model_type", f"{model_type!r} is unknown{_nearest(str(model_type), _CONFIGS)}")
    known = _known_fields(config_class)
    for key in fields:
        if key not in known:
            raise ArchError(key, f"{model_type} has no such field{_nearest(key, known)}")
    if fields.get("is_encoder_decoder"):
        raise ArchError("is_encoder_decoder", "only decoders are implemented")

    if "vocab_size" not in fields:
        if tokenizer_length is None:
            raise ArchError("vocab_size", "needed where no tokenizer is given")
        fields["vocab_size"] = -(-tokenizer_length // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    for key in _SPECIAL_IDS:
        fields.setdefault(key, special_ids.get(key))

    config = _construct(config_class, fields)
    _check_vocabulary(config, tokenizer_length)
    return config


def build_model(config: PretrainedConfig, *, seq_len: int, attn: str, dtype: torch.dtype) -> CausalLM:
    """Our implementation of the config's model type, on the current default device (meta in training).

    Args:
        config: from `build_config` or a checkpoint.
        seq_len: longest row it will see.
        attn: "sdpa" or "varlen".
        dtype: of the parameters.

    Raises:
        ArchError: we do not implement the model type, or something the config asks for.
    """
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise ArchError("model_type", f"{config.model_type!r} is unknown{_nearest(config.model_type, _FAMILIES)}")
    return family(config, seq_len=seq_len, attn=attn, dtype=dtype)


def _known_fields(config_class: type[PretrainedConfig]) -> set[str]:
    # to_dict also has what every config carries (architectures, dtype, ...), so a downloaded config.json fits.
    return set(config_class().to_dict()) | set(config_class.attribute_map) | _ROPE_KEYWORDS


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; it is one of {', '.join(sorted(known))}"


def _construct(config_class: type[PretrainedConfig], fields: dict[str, Any]) -> PretrainedConfig:
    for key, value in fields.items():
        is_size = key.startswith("num_") or key.endswith("_size") or key == "head_dim"
        if is_size and isinstance(value, int) and value < 1:
            raise ArchError(key, f"must be at least 1, not {value}")
    try:
        return config_class(**fields)
    except Exception as error:  # the config classes raise whatever their validators raise
        message = " ".join(str(error).split())
        named = [key for key in fields if re.search(rf"\b{key}\b", message)]
        raise ArchError(named[0] if named else "", message) from error


def _check_vocabulary(config: PretrainedConfig, tokenizer_length: int | None) -> None:
    if tokenizer_length is not None and tokenizer_length > config.vocab_size:
        raise ArchError(
            "vocab_size",
            f"{config.vocab_size} is less than the tokenizer's {tokenizer_length} ids: raise it or drop it",
        )
    for key in _SPECIAL_IDS:
        ids = getattr(config, key)
        for token_id in ids if isinstance(ids, list) else [ids]:
            if token_id is not None and not 0 <= token_id < config.vocab_size:
                raise ArchError(key, f"{token_id} is outside the vocabulary of {config.vocab_size}")
