"""What a config points to for its model: the folder or checkpoint of `model.name`, its tokenizer, its architecture."""

import logging
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from configs.data import SFTDataConfig, TokensDataConfig
from configs.errors import ConfigError
from configs.sft import SFTConfig
from models.errors import ArchError
from models.hf_config import config_from_dict, read_config, with_vocab_size
from models.registry import build_config
from trainer.checkpoint.as_model import is_checkpoint, model_of, refuse_run
from trainer.tokenizer import load_tokenizer, num_ids, special_ids
from trainer.weights.hub import find_model

log = logging.getLogger(__name__)


def find_source(config: SFTConfig, *, download: bool) -> Path | None:
    """The folder or checkpoint of `model.name`; None where `[model.arch]` describes the model.

    Args:
        download: as in `find_model`.

    Raises:
        ConfigError: it is missing, or cannot be used as it is.
    """
    name = config.model.name
    if name is None:
        return None
    folder = find_model(name, download=download)
    refuse_run(folder)
    if config.model.lora is not None and is_checkpoint(folder):
        message = (
            f"{name} is a checkpoint, and adapters are used beside a Hugging Face folder: "
            f"uv run export-hf {name} --output-dir DIR writes one"
        )
        raise ConfigError.one("model.name", message)
    return folder


def load_run_tokenizer(config: SFTConfig, folder: Path | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the run; None where it needs none.

    Args:
        folder: of `model.name`.

    Raises:
        ConfigError: it is missing or cannot be read.
    """
    name = config.tokenizer.name
    if name is not None and (folder is None or name != config.model.name):
        return load_tokenizer(name)
    needed = name is not None or config.val is not None or isinstance(config.data, (SFTDataConfig, TokensDataConfig))
    if folder is not None and needed:
        if is_checkpoint(folder):
            raise ConfigError.one("tokenizer.name", _other_tokenizer(folder))
        log.info("tokenizer: that of %s", config.model.name)
        return load_tokenizer(str(folder), "model.name" if name is None else "tokenizer.name")
    if isinstance(config.data, (SFTDataConfig, TokensDataConfig)):
        raise ConfigError.one("tokenizer.name", f"data of type {config.data.type} needs a tokenizer")
    if config.val is not None:
        raise ConfigError.one("tokenizer.name", "[val] needs a tokenizer, to count bytes or to write conversations")
    return None


def stored_config(
    config: SFTConfig, folder: Path | None, tokenizer: PreTrainedTokenizerBase | None
) -> PretrainedConfig:
    """The architecture of `model.name`, as it is stored, or of `[model.arch]`.

    Raises:
        ConfigError: it asks for something that is not implemented, or cannot be read.
    """
    try:
        if folder is None:
            assert config.model.arch is not None, "SFTConfig.run_faults asks for it"
            length = num_ids(tokenizer) if tokenizer is not None else None
            ids = special_ids(tokenizer) if tokenizer is not None else {}
            return build_config(config.model.arch, tokenizer_length=length, special_ids=ids)
        return config_from_dict(model_of(folder).config) if is_checkpoint(folder) else read_config(folder)
    except ArchError as error:
        raise arch_fault(config, error) from error


def with_room(
    config: SFTConfig, model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> PretrainedConfig:
    """The architecture with a row of its vocabulary for every id that the tokenizer gives."""
    needed, rows = 0 if tokenizer is None else num_ids(tokenizer), model_config.vocab_size
    if needed <= rows:
        return model_config
    multiple = config.model.vocab_multiple
    grown = -(-needed // multiple) * multiple
    log.info(
        "vocabulary: the tokenizer of %s has %d ids and %s has %d rows: embedding and head have %d, a multiple of "
        "model.vocab_multiple = %d",
        *(config.tokenizer_name, needed, config.model.name, rows, grown, multiple),
    )
    return with_vocab_size(model_config, grown)


def arch_fault(config: SFTConfig, error: ArchError) -> ConfigError:
    """What is wrong with an architecture, at the key that gave it."""
    if config.model.name is not None:
        message = f"{error.key}: {error.message}" if error.key else error.message
        return ConfigError.one("model.name", message)
    return ConfigError.one(f"model.arch.{error.key}" if error.key else "model.arch", error.message)


def _other_tokenizer(checkpoint: Path) -> str:
    name = model_of(checkpoint).tokenizer
    used = "its run had none" if name is None else f"its run had {name}"
    return f"is missing: a checkpoint holds no tokenizer; {used}"
