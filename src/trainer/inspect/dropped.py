"""Which conversations give no sample, one by one, and why.

The tokenised conversations are known with the rows they came from, and reasons only in numbers. So the rows that gave
none are read, written and tokenised once more, as many of them as are to be shown.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from configs.data import SFTDataConfig
from configs.inspect import InspectConfig
from trainer.data.chat.cache.tokenise import Tokeniser, Work
from trainer.data.chat.overflow import cut
from trainer.data.chat.read.conversation import LossRules
from trainer.data.chat.selection import CachedPart, lost_reason
from trainer.data.chat.source import ChatSource
from trainer.data.row import RowSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class DroppedRow:
    """A conversation that gives no sample."""

    place: str
    """In the data: "chats.jsonl, line 12"."""

    reason: str


def dropped_rows(
    config: InspectConfig, tokenizer: "PreTrainedTokenizerBase | None", source: RowSource
) -> list[DroppedRow]:
    """The first `config.dropped` of them, in the order of the data; none where the data has no conversations."""
    data = config.data
    if not config.dropped or tokenizer is None or not isinstance(data, SFTDataConfig):
        return []
    assert isinstance(source, ChatSource)
    found = (row for part in source.parts for row in _of_part(config, data, tokenizer, part))
    return list(islice(found, config.dropped))


def _of_part(
    config: InspectConfig, data: SFTDataConfig, tokenizer: "PreTrainedTokenizerBase", part: CachedPart
) -> Iterator[DroppedRow]:
    samples = part.samples
    lost = samples.rows[cut(samples, seq_len=data.seq_len, overflow=data.overflow).lost]
    unused = np.setdiff1d(np.arange(part.part.num_rows), samples.rows, assume_unique=True)
    is_lost = np.concatenate([np.zeros(unused.size, bool), np.ones(lost.size, bool)])
    rows = np.concatenate([unused, lost])
    order = np.argsort(rows)
    tokeniser = None
    for row, too_long in zip(rows[order].tolist(), is_lost[order].tolist(), strict=True):
        if too_long:
            reason = lost_reason(data.overflow, data.seq_len)
        else:
            tokeniser = tokeniser or Tokeniser(
                Work(
                    part=part.part,
                    tokenizer=tokenizer,
                    renderer=config.renderer,
                    rules=LossRules.of(data),
                    key="data",
                )
            )
            ((_, reason),) = tokeniser.tokenise(row, row + 1).dropped
        yield DroppedRow(place=part.part.place(row), reason=reason)
