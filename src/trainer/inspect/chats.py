"""What only conversations have to show: where in the data they lie, their messages, their template."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.data import DataConfig, SFTDataConfig
from configs.inspect import InspectConfig
from trainer.data.chat.read.conversation import LossRules, read_conversation
from trainer.data.chat.render.renderer import Renderer
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
