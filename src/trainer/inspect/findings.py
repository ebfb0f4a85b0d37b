"""All that an inspection finds, before anything of it is shown."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.inspect import InspectConfig
from trainer.data.row import RowSource, Track
from trainer.inspect.chats import template_of
from trainer.inspect.counts import Counts, count
from trainer.inspect.dropped import DroppedRow, dropped_rows
from trainer.inspect.inputs import counted_epoch, load_inputs, plan_of
from trainer.inspect.rows import Selection, select_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.preflight import Plan


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What is shown."""

    tokenizer: "PreTrainedTokenizerBase | None"
    source: RowSource
    plan: "Plan | None"
    """None where the config does not bound the run."""

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
    inputs = load_inputs(config, track)
    source = inputs.source
    epoch = counted_epoch(config, source)
    return Findings(
        tokenizer=inputs.tokenizer,
        source=source,
        plan=plan_of(config, source),
        template=template_of(config, inputs.tokenizer),
        selection=select_rows(config, source),
        counts=count(source, epoch=epoch, scan=config.scan, track=track) if config.counts else None,
        dropped=dropped_rows(config, inputs.tokenizer, source),
    )
