"""What an inspection needs of a run: its tokenizer and its source of rows, with or without a model in the config."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.data import SFTDataConfig, TokensDataConfig
from configs.errors import ConfigError
from configs.inspect import InspectConfig
from trainer.data.build import build_source
from trainer.data.chat.build import chat_tools
from trainer.data.row import RowSource, Track
from trainer.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.preflight import Plan


@dataclass(frozen=True, kw_only=True)
class InspectInputs:
    """What is looked at."""

    tokenizer: "PreTrainedTokenizerBase | None"
    source: RowSource


def load_inputs(config: InspectConfig, track: Track) -> InspectInputs:
    """Tokenizer and rows. A model in the config gives the number of ids, as in training; its weights play no part.

    Args:
        track: told of long work.

    Raises:
        ConfigError: as `sft` would raise it.
    """
    if config.vocab_size is None and (config.model.arch is not None or config.model.name is not None):
        # Takes seconds to import.
        from trainer.preflight import prepare

        inputs = prepare(config.model_copy(update={"val": None}), download=True, track=track)
        return InspectInputs(tokenizer=inputs.tokenizer, source=inputs.source)
    name = config.tokenizer_name
    tokenizer = load_tokenizer(name) if name is not None else None
    if tokenizer is None and isinstance(config.data, (SFTDataConfig, TokensDataConfig)):
        raise ConfigError.one("tokenizer.name", f"data of type {config.data.type} needs a tokenizer")
    vocab_size = config.vocab_size or (len(tokenizer) if tokenizer is not None else None)
    if vocab_size is None:
        message = "is missing: made-up ids are drawn below it; or give model.arch.vocab_size or a tokenizer"
        raise ConfigError.one("vocab_size", message)
    source = build_source(
        config.data,
        vocab_size=vocab_size,
        eos_token_id=tokenizer.eos_token_id if tokenizer is not None else None,  # type: ignore[arg-type]
        tokenizer_name=name,
        chats=chat_tools(config, tokenizer, track),
    )
    return InspectInputs(tokenizer=tokenizer, source=source)


def plan_of(config: InspectConfig, source: RowSource) -> "Plan | None":
    """Steps and epochs of the run; None where the config does not bound it.

    Raises:
        ConfigError: data and steps do not fit, or the step to show is not one of them.
    """
    if config.max_steps is None and config.data.max_epochs is None:
        return None
    from trainer.preflight import plan_run

    # Which rows are read does not depend on the number of ranks, and one rank fits every batch.
    plan = plan_run(config, source, 1)
    if config.step is not None and config.step > plan.steps:
        raise ConfigError.one("step", f"{config.step} is past the end: the run has {plan.steps:,} steps")
    return plan


def counted_epoch(config: InspectConfig, source: RowSource) -> int:
    """The epoch asked for, or the one that the step begins in when nothing was skipped."""
    if config.step is None:
        return config.epoch
    return (config.step - 1) * config.data.batch_size // source.num_rows
