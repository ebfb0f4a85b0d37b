"""What only conversations have to show: where in the data they lie, their messages, their template, and which of them
give no sample."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from configs.data import DataConfig, SFTDataConfig
from configs.inspect import InspectConfig
from trainer.data.chat.cache.tokenise import Tokeniser, Work
from trainer.data.chat.overflow import cut
from trainer.data.chat.read.conversation import LossRules, read_conversation
from trainer.data.chat.render.renderer import Renderer
from trainer.data.chat.selection import CachedPart, lost_reason
from trainer.data.chat.source import ChatSource
from trainer.data.row import RowSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a segment that holds a conversation, or a part of one, comes from."""

    place: str
    """In the data: "chats.jsonl, line 12"."""

    roles: list[str]
    """Of its messages."""

    first_token: int
    """Of the conversation, at the segment's first position; above 0 only in later parts of a split one."""

    num_tokens: int
    """Of the whole conversation, before anything was cut."""


@dataclass(frozen=True, kw_only=True)
class DroppedRow:
    """A conversation that gives no sample."""

    place: str
    """In the data: "chats.jsonl, line 12"."""

    reason: str


def origins_of(config: DataConfig, source: RowSource, epoch: int, index: int) -> list[Origin]:
    """Of the samples of a row, in order; none where the data has no conversations."""
    if not isinstance(config, SFTDataConfig) or not isinstance(source, ChatSource):
        return []
    rules = LossRules.of(config)
    found = []
    for piece in source.row_pieces(epoch, index):
        part = source.parts[piece.part_number]
        (raw,) = part.part.rows(piece.row, piece.row + 1)
        roles = [str(message["role"]) for message in read_conversation(raw, rules).messages]
        num_tokens = int(part.samples.lengths[piece.sample])
        found.append(Origin(place=piece.place, roles=roles, first_token=piece.start, num_tokens=num_tokens))
    return found


def template_of(config: InspectConfig, tokenizer: "PreTrainedTokenizerBase | None") -> str | None:
    """Which template writes the conversations, and how it shows what carries loss; None where there are none."""
    if tokenizer is None or not isinstance(config.data, SFTDataConfig):
        return None
    return Renderer(tokenizer, config.renderer, LossRules.of(config.data).roles).description


def dropped_rows(
    config: InspectConfig, tokenizer: "PreTrainedTokenizerBase | None", source: RowSource
) -> list[DroppedRow]:
    """The first `config.dropped` of them, in the order of the data; none where the data has no conversations."""
    data = config.data
    if not config.dropped or tokenizer is None or not isinstance(data, SFTDataConfig):
        return []
    assert isinstance(source, ChatSource)
    found = (row for part in source.parts for row in _dropped_of_part(config, data, tokenizer, part))
    return list(islice(found, config.dropped))


def _dropped_of_part(
    config: InspectConfig, data: SFTDataConfig, tokenizer: "PreTrainedTokenizerBase", part: CachedPart
) -> Iterator[DroppedRow]:
    """The cache knows the rows that gave a sample, and reasons in numbers alone. So each row without one is tokenised
    once more for its reason."""
    samples = part.samples
    lost = samples.rows[cut(samples, seq_len=data.seq_len, overflow=data.overflow).lost]
    unused = np.setdiff1d(np.arange(samples.record.num_rows), samples.rows, assume_unique=True)
    rows = np.union1d(unused, lost)
    tokeniser = None
    for row, is_lost in zip(rows.tolist(), np.isin(rows, lost).tolist(), strict=True):
        if is_lost:
            reason = lost_reason(data.overflow, data.seq_len)
        else:
            rules = LossRules.of(data)
            work = Work(part=part.part, tokenizer=tokenizer, renderer=config.renderer, rules=rules, key="data")
            tokeniser = tokeniser or Tokeniser(work)
            ((_, reason),) = tokeniser.tokenise(row, row + 1).dropped
        yield DroppedRow(place=part.part.place(row), reason=reason)
