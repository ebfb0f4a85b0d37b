"""From `[val]` to what scores it."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from configs.errors import ConfigError
from configs.validation import ValChatConfig, ValConfig, ValSetConfig
from trainer.data.chat.build import ChatTools, build_val_chats
from trainer.parallel.mesh import Mesh
from trainer.validation.chat_task import ChatTask
from trainer.validation.scoring import Validation
from trainer.validation.set_task import SetTask
from trainer.validation.task import Task
from trainer.validation.token_bytes import adds_leading_space, token_bytes
from trainer.validation.token_set import TokenSet
from trainer.validation.windows import KEY, LikelihoodSet

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase


def build_validation(
    config: ValConfig | None,
    *,
    tokenizer: "PreTrainedTokenizerBase | None",
    vocab_size: int,
    mesh: Mesh,
    pin_memory: bool,
    chats: ChatTools | None = None,
) -> Validation | None:
    """What scores the sets and conversations of `[val]`; None without that table.

    Args:
        config: the table.
        tokenizer: of the run; it says how many bytes a token has.
        vocab_size: ids the model knows.
        mesh: the ranks that share the work.
        pin_memory: batches go through pinned memory.
        chats: what turns conversations into tokens; None when the run has no tokenizer.

    Raises:
        ConfigError: a set or the conversations are missing, damaged, of another tokenizer or without anything to score,
            or the bytes of a set's tokens cannot be counted.
    """
    if config is None:
        return None
    tasks: list[Task] = []
    if config.data is not None:
        tasks.append(_build_chats(config.data, chats, vocab_size))
    if config.sets:
        tasks += _build_sets(config, tokenizer, vocab_size, mesh.device)
    return Validation(tasks=tasks, mesh=mesh, pin_memory=pin_memory)


def _build_chats(config: ValChatConfig, chats: ChatTools | None, vocab_size: int) -> ChatTask:
    if chats is None:
        raise ConfigError.one("tokenizer.name", "the conversations of val.data need a tokenizer with a chat template")
    source = build_val_chats(config, chats, vocab_size=vocab_size)
    return ChatTask(source, rows_per_forward=config.micro_batch_size)


def _build_sets(
    config: ValConfig, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int, device: torch.device
) -> list[SetTask]:
    if tokenizer is None:
        raise ConfigError.one("tokenizer.name", "held-out sets are scored per byte, which takes the tokenizer")
    counts = token_bytes(tokenizer, vocab_size)
    byte_counts = torch.from_numpy(counts).to(device)
    prefix_id = _prefix_id(tokenizer, counts) if config.context == "prefix" else None
    tasks = []
    for entry in config.sets:
        set_ = _build_set(_locate(entry, config.data_dir), tokenizer, vocab_size, prefix_id)
        for seq_len in config.seq_lens:
            tasks.append(
                SetTask(set_, seq_len=seq_len, micro_batch_tokens=config.micro_batch_tokens, byte_counts=byte_counts)
            )
    return tasks


def _prefix_id(tokenizer: "PreTrainedTokenizerBase", byte_counts: "np.ndarray") -> int:
    bos_id, eos_id = _special_id(tokenizer, "bos_token_id"), _special_id(tokenizer, "eos_token_id")
    prefix_id = bos_id if bos_id is not None else eos_id
    if prefix_id is None:
        raise ConfigError.one("val.context", '"prefix" takes a BOS or EOS token, and the tokenizer has neither')
    if adds_leading_space(tokenizer, byte_counts):
        # The first token of a document is scored, and spells one byte that is not in the text.
        raise ConfigError.one(
            "val.context", 'the tokenizer puts a space before every text, so only "none" can count bytes exactly'
        )
    return prefix_id


def _locate(entry: str | ValSetConfig, data_dir: Path | None) -> ValSetConfig:
    if isinstance(entry, ValSetConfig):
        return entry
    assert data_dir is not None, "ValConfig refuses names without data_dir"
    return ValSetConfig(name=entry, path=data_dir / entry)


def _build_set(
    config: ValSetConfig, tokenizer: "PreTrainedTokenizerBase", vocab_size: int, prefix_id: int | None
) -> LikelihoodSet:
    match _kind(config.path):
        case "tokens":
            return TokenSet(
                config.name,
                config.path,
                vocab_size=vocab_size,
                eos_token_id=_special_id(tokenizer, "eos_token_id"),
                tokenizer_name=tokenizer.name_or_path,
                prefix_id=prefix_id,
            )


def _kind(path: Path) -> Literal["tokens"]:
    """How a set is stored."""
    if path.suffix == ".ds" or any(path.glob("*.ds")):
        return "tokens"
    raise ConfigError.one(KEY, f"{path} is not a folder of token shards (*.ds)")


def _special_id(tokenizer: "PreTrainedTokenizerBase", name: str) -> int | None:
    id_ = getattr(tokenizer, name)
    return id_ if isinstance(id_, int) else None
