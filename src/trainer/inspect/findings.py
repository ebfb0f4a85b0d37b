"""All that an inspection finds, before anything of it is shown."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.inspect import InspectConfig
from trainer.data.row import RowSource, Track
from trainer.inspect.counts import Counts, count
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

    selection: Selection
    counts: Counts | None
    """None where they were not asked for."""


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
    plan = plan_of(config, source)
    selection = select_rows(config, source)
    epoch = counted_epoch(config, source)
    counts = count(source, epoch=epoch, scan=config.scan, track=track) if config.counts else None
    return Findings(tokenizer=inputs.tokenizer, source=source, plan=plan, selection=selection, counts=counts)
