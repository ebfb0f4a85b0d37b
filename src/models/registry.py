"""Which families we implement, how `model.arch` becomes a Hugging Face config, and how a config becomes a model."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig

from models.base import CausalLM
from models.dense.modeling import DenseForCausalLM
from models.errors import ArchError
from models.hf_config import SPECIAL_IDS, config_class_of, construct_config, known_fields, nearest

_FAMILIES: dict[str, Callable[..., CausalLM]] = {
    "llama": DenseForCausalLM,
    "mistral": DenseForCausalLM,
    "qwen2": DenseForCausalLM,
    "qwen3": DenseForCausalLM,
    "smollm3": DenseForCausalLM,
}

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
    for key in SPECIAL_IDS:
        fields.setdefault(key, special_ids.get(key))

    config = construct_config(config_class, fields)
    check_vocabulary(config, tokenizer_length=tokenizer_length)
    return config


def build_model(
    config: PretrainedConfig, *, seq_len: int, attn: str, dtype: torch.dtype, impl: str = "auto"
) -> CausalLM:
    """The model, on the current default device (meta in training).

    Args:
        config: from `build_config` or a checkpoint.
        seq_len: longest row it will see.
        attn: "sdpa" or "varlen".
        dtype: of the parameters.
        impl: "custom", "hf" or "auto"; see `choose_impl`.

    Raises:
        ArchError: the implementation does not have the model type, or something the config asks for.
    """
    if choose_impl(config.model_type, impl) == "hf":
        # Late: it imports transformers' models, which nobody needs who has one of ours.
        from models.hf.build import build_transformers_model

        return build_transformers_model(config, seq_len=seq_len, attn=attn, dtype=dtype)
    try:
        return _FAMILIES[config.model_type](config, seq_len=seq_len, attn=attn, dtype=dtype)
    except ArchError as error:
        if not _transformers_can(config, seq_len=seq_len, attn=attn, dtype=dtype):
            raise
        message = f'{error.message}; transformers\' own model computes it (model.impl = "hf")'
        raise ArchError(error.key, message) from error


def choose_impl(model_type: str, impl: str) -> str:
    """`auto` is "custom" for the families that we implement, else "hf"; by model type alone.

    Raises:
        ArchError: "custom" was asked for and we do not implement the family.
    """
    if impl == "auto":
        return "custom" if model_type in _FAMILIES else "hf"
    if impl == "custom" and model_type not in _FAMILIES:
        raise ArchError(
            "model_type",
            f"{model_type} is none of the families implemented here ({', '.join(_FAMILIES)}); with "
            'model.impl = "hf" (or "auto") transformers\' own model is trained',
        )
    return impl


def _transformers_can(config: PretrainedConfig, **options: Any) -> bool:
    from models.hf.build import build_transformers_model

    try:
        with torch.device("meta"):
            build_transformers_model(config, **options)
    except ArchError:
        return False
    return True


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
    for key in SPECIAL_IDS:
        ids = getattr(config, key)
        for token_id in ids if isinstance(ids, list) else [ids]:
            if token_id is not None and not 0 <= token_id < config.vocab_size:
                raise ArchError(key, f"{token_id} is outside the vocabulary of {config.vocab_size}")
