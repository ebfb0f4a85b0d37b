"""From a table of conversations to its source of rows."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.data import SFTDataConfig
from configs.renderer import RendererConfig
from configs.sft import SFTConfig
from configs.validation import ValChatConfig
from trainer.data.chat.cache.cache import open_or_build
from trainer.data.chat.cache.tokenise import Work
from trainer.data.chat.read.conversation import LossRules
from trainer.data.chat.read.parts import open_parts
from trainer.data.chat.render.renderer import Renderer
from trainer.data.chat.selection import CachedPart, RowOptions
from trainer.data.chat.source import ChatSource
from trainer.data.row import Track

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ChatTools:
    """What conversations take besides their own table."""

    tokenizer: "PreTrainedTokenizerBase"

    renderer: RendererConfig
    """How the tokenizer's chat template is used."""

    cache_dir: Path
    """Where tokenised conversations are kept, unless the table names a folder."""

    track: Track
    """Told of long work."""


def chat_tools(config: SFTConfig, tokenizer: "PreTrainedTokenizerBase | None", track: Track) -> ChatTools | None:
    """What turns the conversations of a config into tokens; None without a tokenizer."""
    if tokenizer is None:
        return None
    return ChatTools(tokenizer=tokenizer, renderer=config.renderer, cache_dir=config.chat_cache, track=track)


def build_chats(config: SFTDataConfig, tools: ChatTools, *, vocab_size: int) -> ChatSource:
    """The rows that a table of conversations asks for.

    Args:
        vocab_size: embeddings of the model; no row holds an id from here on.

    Raises:
        ConfigError: the data is missing, malformed or holds nothing to train on, or its template cannot be used.
    """
    return _build(
        config,
        tools,
        vocab_size,
        key="data",
        seed=config.seed,
        shuffle=config.shuffle,
        probabilities=config.probabilities,
        stopping_strategy=config.stopping_strategy,
    )


def build_val_chats(config: ValChatConfig, tools: ChatTools, *, vocab_size: int) -> ChatSource:
    """The rows of `[val.data]`: every sample once, in every epoch alike.

    Raises:
        ConfigError: as for `build_chats`, about the keys of val.data.
    """
    return _build(
        config,
        tools,
        vocab_size,
        key="val.data",
        seed=0,
        shuffle=False,
        probabilities=None,
        stopping_strategy="all_exhausted",
    )


def _build(
    config: SFTDataConfig | ValChatConfig, tools: ChatTools, vocab_size: int, *, key: str, **order: Any
) -> ChatSource:
    """Args:
    order: the rest of RowOptions.
    """
    tokenizer, rules = tools.tokenizer, LossRules.of(config)
    log.info("template of %s: %s", key, Renderer(tokenizer, tools.renderer, rules.roles).description)
    # Any token would do: padding carries no loss and is attended by nothing else.
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    padding_id = next((id_ for id_ in known if isinstance(id_, int) and id_ < vocab_size), 0)
    parts = []
    for part in open_parts(config):
        work = Work(part=part, tokenizer=tokenizer, renderer=tools.renderer, rules=rules, key=key)
        samples = open_or_build(
            work, cache_dir=config.cache_dir or tools.cache_dir, workers=config.cache_workers, track=tools.track
        )
        parts.append(CachedPart(part=part, samples=samples))
    options = RowOptions(
        seq_len=config.seq_len, packing=config.packing, overflow=config.overflow, padding_id=padding_id, **order
    )
    return ChatSource(parts, options, vocab_size=vocab_size, key=key)
