"""The JSON files of a Hugging Face model folder: `config.json` and `generation_config.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.files import write_whole
from trainer.tokenizer import SPECIAL_IDS

# Code of other repositories that the config came with, and the folder it was read from.
_FOREIGN = ("auto_map", "_name_or_path", "quantization_config", "torch_dtype")

# What every config says by default, which says nothing about this one.
_COMMON = (
    *("output_hidden_states", "output_attentions", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("id2label", "label2id", "problem_type"),
)


def write_config(folder: Path, config: Mapping[str, Any], dtype: str) -> None:
    """Write `config.json`.

    Args:
        config: JSON values of a Hugging Face config, `model_type` included.
        dtype: of the weights beside it.
    """
    # Imports every model's name, which takes a while.
    from transformers import PretrainedConfig, __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    plain = json.loads(json.dumps(PretrainedConfig().to_dict()))
    values = {
        key: value
        for key, value in config.items()
        if key not in _FOREIGN and not (key in _COMMON and plain.get(key) == value)
    }
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"])
    values["architectures"] = config.get("architectures") or ([architecture] if architecture else None)
    values["tie_word_embeddings"] = bool(config.get("tie_word_embeddings"))
    values["dtype"] = dtype
    values["transformers_version"] = __version__
    _write(folder / "config.json", values)


def write_generation_config(folder: Path, config: Mapping[str, Any], tokenizer_ids: Mapping[str, int | None]) -> None:
    """Write `generation_config.json`: where generation begins and ends.

    The ids are those of the model's config and, where it has none, the tokenizer's. Generation ends at either's EOS.

    Args:
        config: as in `write_config`.
        tokenizer_ids: special ids by their key in the config; empty without tokenizer.
    """
    from transformers import __version__

    values: dict[str, Any] = {}
    for key in SPECIAL_IDS:
        own, other = config.get(key), tokenizer_ids.get(key)
        value = other if own is None else own
        if key == "eos_token_id" and own is not None and other is not None:
            ids = list(dict.fromkeys([*(own if isinstance(own, list) else [own]), other]))
            value = ids[0] if len(ids) == 1 else ids
        if value is not None:
            values[key] = value
    _write(folder / "generation_config.json", values | {"transformers_version": __version__})


def _write(path: Path, values: Mapping[str, Any]) -> None:
    write_whole(path, (json.dumps(values, indent=2, sort_keys=True) + "\n").encode())
