"""From a table of conversations to its source of rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from configs.data import SFTDataConfig
from configs.errors import ConfigError
from configs.renderer import RendererConfig
from configs.sft import SFTConfig
from trainer.data.row import RowSource, Track

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def build_chats(config: SFTDataConfig, tools: ChatTools, *, vocab_size: int) -> RowSource:
    """The rows that a table of conversations asks for.

    Args:
        vocab_size: embeddings of the model; no row holds an id from here on.

    Raises:
        ConfigError: the data is missing, malformed or holds nothing to train on, or its template cannot be used.
    """
    raise ConfigError.one("data.type", "sft is being built")
