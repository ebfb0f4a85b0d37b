"""From `[val]` to what scores it."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from configs.errors import ConfigError, Fault, collecting
from configs.validation import SET_ENDINGS, SuiteConfig, ValChatConfig, ValSetConfig
from trainer.data.chat.build import ChatTools, build_val_chats
from trainer.data.row import Track, untracked
from trainer.parallel.mesh import Mesh
from trainer.tokenizer import special_ids
from trainer.validation.chat_task import ChatTask
from trainer.validation.scoring import Validation
from trainer.validation.set_task import SetTask
from trainer.validation.sets.text_encoder import TextEncoder
from trainer.validation.sets.text_set import Prefix, TextSet
from trainer.validation.sets.token_folder import TokenFolder
from trainer.validation.task import Task
from trainer.validation.token_bytes import adds_leading_space, token_bytes
from trainer.validation.windows import KEY, LikelihoodSet

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase


def build_validation(
    config: SuiteConfig | None,
    *,
    tokenizer: "PreTrainedTokenizerBase | None",
    vocab_size: int,
    mesh: Mesh,
    pin_memory: bool,
    cache_dir: Path,
    chats: ChatTools | None = None,
    arrays_dir: Path | None = None,
    track: Track = untracked,
) -> Validation | None:
    """What scores the sets and conversations of `[val]`; None without that table. Collective.

    Args:
        config: the table.
        tokenizer: of the run; it says how many bytes a token has.
        vocab_size: ids the model knows.
        mesh: the ranks that share the work.
        pin_memory: batches go through pinned memory.
        cache_dir: folder of tokenised sets, where the table names none.
        chats: what turns conversations into tokens; None when the run has no tokenizer.
        arrays_dir: folder for the scores of single documents; None: they are not kept.
        track: told how far the tokenising is.

    Raises:
        ConfigError: a set or the conversations are missing, damaged, of another tokenizer or without anything to score,
            the bytes of a set's tokens cannot be counted, or ranks see different data.
    """
    if config is None:
        return None
    tasks: list[Task] = []
    faults: list[Fault] = []
    with collecting(faults):
        if config.data is not None:
            tasks.append(_build_chats(config.data, chats, vocab_size))
    with collecting(faults):
        if config.sets:
            tasks += _build_sets(
                config,
                tokenizer,
                vocab_size,
                mesh.device,
                cache_dir=config.cache_dir or cache_dir,
                track=track,
            )
    if faults:
        raise ConfigError(faults)
    validation = Validation(tasks=tasks, mesh=mesh, pin_memory=pin_memory, arrays_dir=arrays_dir)
    validation.agree()
    return validation


def _build_chats(config: ValChatConfig, chats: ChatTools | None, vocab_size: int) -> ChatTask:
    if chats is None:
        raise ConfigError.one("tokenizer.name", "the conversations of val.data need a tokenizer with a chat template")
    source = build_val_chats(config, chats, vocab_size=vocab_size)
    return ChatTask(source, rows_per_forward=config.micro_batch_size)


def _build_sets(
    config: SuiteConfig,
    tokenizer: "PreTrainedTokenizerBase | None",
    vocab_size: int,
    device: torch.device,
    *,
    cache_dir: Path,
    track: Track,
) -> list[SetTask]:
    if tokenizer is None:
        raise ConfigError.one("tokenizer.name", "held-out sets are scored per byte, which takes the tokenizer")
    counts = token_bytes(tokenizer, vocab_size)
    text_ids = torch.from_numpy(counts > 0).to(device)
    prefix_id = _prefix_id(tokenizer, vocab_size) if config.context == "prefix" else None
    encoder = TextEncoder(tokenizer)
    tasks = []
    faults: list[Fault] = []
    for entry in config.sets:
        with collecting(faults):
            located = _locate(entry, config.data_dir)
            set_ = _build_set(located, tokenizer, counts, prefix_id, encoder=encoder, cache_dir=cache_dir, track=track)
            for seq_len in config.seq_lens_of(entry):
                tasks.append(
                    SetTask(set_, seq_len=seq_len, micro_batch_tokens=config.micro_batch_tokens, text_ids=text_ids)
                )
    if faults:
        raise ConfigError(faults)
    return tasks


def _prefix_id(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> int:
    ids = special_ids(tokenizer)
    prefix_id = ids["eos_token_id"] if ids["bos_token_id"] is None else ids["bos_token_id"]
    if prefix_id is None:
        raise ConfigError.one("val.context", '"prefix" takes a BOS or EOS token, and the tokenizer has neither')
    if prefix_id >= vocab_size:
        message = f'"prefix" takes token {prefix_id} of the tokenizer, but the model\'s vocabulary has {vocab_size}'
        raise ConfigError.one("val.context", message)
    return prefix_id


def _locate(entry: str | ValSetConfig, data_dir: Path | None) -> ValSetConfig:
    if isinstance(entry, ValSetConfig):
        return entry
    assert data_dir is not None, "SuiteConfig refuses names without data_dir"
    found = [path for path in (data_dir / f"{entry}{ending}" for ending in SET_ENDINGS) if path.exists()]
    if len(found) > 1:
        raise ConfigError.one(KEY, f"{entry!r} is unclear: there are {found[0]} and {found[1]}; give {{name, path}}")
    if not found:
        names = ", ".join(f"{entry}{ending}" for ending in SET_ENDINGS)
        raise ConfigError.one(KEY, f"{data_dir} holds no set {entry!r}: nothing there is called {names}")
    return ValSetConfig(name=entry, path=found[0])


def _build_set(
    config: ValSetConfig,
    tokenizer: "PreTrainedTokenizerBase",
    byte_counts: "np.ndarray",
    prefix_id: int | None,
    *,
    encoder: TextEncoder,
    cache_dir: Path,
    track: Track,
) -> LikelihoodSet:
    match _storage(config.path):
        case "tokens":
            if prefix_id is not None and adds_leading_space(tokenizer, byte_counts):
                # The first token of a document is scored, and spells one byte that is not in the text.
                raise ConfigError.one(
                    "val.context",
                    f"the tokenizer puts a space before every text, and the shards of {config.name} do not say where, "
                    'so only "none" can count bytes exactly',
                )
            return TokenFolder(
                config.name,
                config.path,
                byte_counts=byte_counts,
                eos_token_id=special_ids(tokenizer)["eos_token_id"],
                tokenizer_name=tokenizer.name_or_path,
                prefix_id=prefix_id,
                max_documents=config.max_documents,
            )
        case "rows":
            return TextSet(
                config.name,
                config.path,
                encoder=encoder,
                byte_counts=byte_counts,
                prefix=None if prefix_id is None else Prefix(id=prefix_id, always=_begins_texts(tokenizer, prefix_id)),
                cache_dir=cache_dir,
                track=track,
                max_documents=config.max_documents,
            )


def _storage(path: Path) -> Literal["tokens", "rows"]:
    """How a set is stored."""
    return "tokens" if path.suffix == ".ds" or any(path.glob("*.ds")) else "rows"


def _begins_texts(tokenizer: "PreTrainedTokenizerBase", prefix_id: int) -> bool:
    """Whether the tokenizer begins every text with this token."""
    return tokenizer.encode("a")[:1] == [prefix_id]
