"""What a config points to, loaded: tokenizer, architecture, data."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from configs.errors import ConfigError
from configs.sft import SFTConfig
from models.errors import ArchError
from models.hf_config import shorten
from trainer.data.build import build_source
from trainer.data.chat.build import chat_tools
from trainer.data.row import RowSource, Track, untracked
from trainer.model_source import find_source, load_run_tokenizer, stored_config, with_room


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """What a config points to for its model, loaded and checked."""

    tokenizer: PreTrainedTokenizerBase | None
    model_folder: Path | None
    """Of `model.name`, a Hugging Face folder or a checkpoint; its weights need not be there."""

    whole_config: PretrainedConfig
    model_config: PretrainedConfig
    """Of the model of the run: all of `whole_config`, or its first `model.debug.num_layers` blocks."""

    stored_vocab_size: int
    """Rows of the vocabulary in the files of `model.name`: fewer than the model's where it has grown."""


@dataclass(frozen=True, kw_only=True)
class Inputs(ModelInputs):
    """All that a training run's config points to, loaded and checked."""

    source: RowSource


def prepare_model(config: SFTConfig, *, download: bool = False) -> ModelInputs:
    """Load the tokenizer and the architecture that a config names.

    The vocabulary grows where the tokenizer has more ids, but not that of a model by name that is only scored: rows
    without a meaning would take their share of every likelihood.

    Args:
        download: fetch what the model's folder on the hub has besides weights; otherwise its cache must have it.

    Raises:
        ConfigError: one of them is missing, damaged, or does not fit the other.
    """
    model_folder = find_source(config, download=download)
    tokenizer = load_run_tokenizer(config, model_folder)
    stored = stored_config(config, model_folder, tokenizer)
    as_stored = config.only_scores and config.resume is None
    whole_config = stored if as_stored else with_room(config, stored, tokenizer)
    num_layers = config.model.debug.num_layers
    try:
        model_config = whole_config if num_layers is None else shorten(whole_config, num_layers)
    except ArchError as error:
        raise ConfigError.one("model.debug.num_layers", error.message) from error
    return ModelInputs(
        tokenizer=tokenizer,
        model_folder=model_folder,
        whole_config=whole_config,
        model_config=model_config,
        stored_vocab_size=stored.vocab_size,
    )


def prepare(config: SFTConfig, *, download: bool = False, track: Track = untracked) -> Inputs:
    """Load the tokenizer, the architecture and the training data that a config names.

    Args:
        download: as in `prepare_model`.
        track: told of long work.

    Raises:
        ConfigError: one of them is missing, damaged, or does not fit the others.
    """
    model = prepare_model(config, download=download)
    tokenizer = model.tokenizer
    source = build_source(
        config.data,
        vocab_size=model.model_config.vocab_size,
        eos_token_id=tokenizer.eos_token_id if tokenizer is not None else None,  # type: ignore[arg-type]
        tokenizer_name=None if tokenizer is None else config.tokenizer_name,
        chats=chat_tools(config, tokenizer, track),
    )
    return Inputs(**vars(model), source=source)
