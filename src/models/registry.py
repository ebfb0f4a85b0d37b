"""Which families we implement, and how `model.arch` becomes a Hugging Face config and a model."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig

from models.base import CausalLM
from models.dense.modeling import DenseForCausalLM
from models.errors import ArchError
from models.hf_config import config_class_of, construct_config, known_fields, nearest

_FAMILIES: dict[str, Callable[..., CausalLM]] = {
    "llama": DenseForCausalLM,
    "mistral": DenseForCausalLM,
    "qwen2": DenseForCausalLM,
    "qwen3": DenseForCausalLM,
    "smollm3": DenseForCausalLM,
}

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
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
    config_class = config_class_of(model_type)
    known = known_fields(config_class)
    for key in fields:
        if key not in known:
            raise ArchError(key, f"{model_type} has no such field{nearest(key, known)}")

    if "vocab_size" not in fields:
        if tokenizer_length is None:
            raise ArchError("vocab_size", "needed where no tokenizer is given")
        fields["vocab_size"] = -(-tokenizer_length // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    for key in _SPECIAL_IDS:
        fields.setdefault(key, special_ids.get(key))

    config = construct_config(config_class, fields)
    check_vocabulary(config, tokenizer_length=tokenizer_length)
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
        raise ArchError("model_type", f"{config.model_type!r} is unknown{nearest(config.model_type, _FAMILIES)}")
    return family(config, seq_len=seq_len, attn=attn, dtype=dtype)


def check_vocabulary(config: PretrainedConfig, *, tokenizer_length: int | None) -> None:
    """Check that every id a tokenizer gives has a row in the embedding.

    Args:
        config: its special ids are checked too.
        tokenizer_length: `len(tokenizer)`, or None when there is none.

    Raises:
        ArchError: an id is outside the vocabulary.
    """
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
