"""All that an inspection finds, before anything of it is shown."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.data import SFTDataConfig, TokensDataConfig
from configs.errors import ConfigError
from configs.inspect import InspectConfig
from trainer.data.build import build_source
from trainer.data.chat.build import chat_tools
from trainer.data.row import RowSource, Track
from trainer.inspect.chats import DroppedRow, dropped_rows, template_of
from trainer.inspect.counts import Counts, count
from trainer.inspect.rows import Selection, select_rows
from trainer.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.preflight import Plan


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What is shown."""

    tokenizer: "PreTrainedTokenizerBase | None"
    source: RowSource
    plan: "Plan | None"
    """None where the config does not bound the run, or trains nothing."""

    template: str | None
    """Of conversations: which template writes them, and how it shows what carries loss."""

    selection: Selection
    counts: Counts | None
    """None where they were not asked for."""

    dropped: list[DroppedRow]
    """As many as were asked for."""


def gather(config: InspectConfig, track: Track) -> Findings:
    """Look at what the config asks for.

    Args:
        track: told of long work.

    Raises:
        ConfigError: as `sft` would raise it, or there are no such rows.
        RowError: a row cannot be given, or an index is found damaged.
    """
    tokenizer, source = _load(config, track)
    epoch = config.epoch
    if config.step is not None:  # the epoch that the step begins in when nothing was skipped
        epoch = (config.step - 1) * config.data.batch_size // source.num_rows
    return Findings(
        tokenizer=tokenizer,
        source=source,
        plan=_plan(config, source),
        template=template_of(config, tokenizer),
        selection=select_rows(config, source),
        counts=count(source, epoch=epoch, scan=config.scan, track=track) if config.counts else None,
        dropped=dropped_rows(config, tokenizer, source),
    )


def _load(config: InspectConfig, track: Track) -> tuple["PreTrainedTokenizerBase | None", RowSource]:
    """Tokenizer and rows. A model in the config gives the number of ids, as in training; its weights play no part."""
    if config.vocab_size is None and (config.model.arch is not None or config.model.name is not None):
        # Takes seconds to import.
        from trainer.preflight import prepare

        inputs = prepare(config.model_copy(update={"val": None}), download=True, track=track)
        return inputs.tokenizer, inputs.source
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
    return tokenizer, source


def _plan(config: InspectConfig, source: RowSource) -> "Plan | None":
    if config.only_scores or (config.max_steps is None and config.data.max_epochs is None):
        return None
    from trainer.preflight import plan_run

    # Which rows are read does not depend on the number of ranks, and one rank fits every batch.
    plan = plan_run(config, source, 1)
    if config.step is not None and config.step > plan.steps:
        raise ConfigError.one("step", f"{config.step} is past the end: the run has {plan.steps:,} steps")
    return plan
