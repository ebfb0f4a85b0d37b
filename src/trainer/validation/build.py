"""From `[val]` to what scores it."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from configs.errors import ConfigError
from configs.validation import ValConfig, ValSetConfig
from trainer.parallel.mesh import Mesh
from trainer.validation.packing import pack
from trainer.validation.scoring import Task, Validation
from trainer.validation.token_bytes import adds_leading_space, token_bytes
from trainer.validation.token_set import TokenSet
from trainer.validation.windows import LikelihoodSet

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

_SETS = "val.sets"


def build_validation(
    config: ValConfig | None,
    *,
    tokenizer: "PreTrainedTokenizerBase | None",
    vocab_size: int,
    mesh: Mesh,
    pin_memory: bool,
) -> Validation | None:
    """What scores the sets of `[val]`; None without that table.

    Args:
        config: the table.
        tokenizer: of the run; it says how many bytes a token has.
        vocab_size: ids the model knows.
        mesh: the ranks that share the work.
        pin_memory: batches go through pinned memory.

    Raises:
        ConfigError: a set is missing, damaged, of another tokenizer or without anything to score, or the tokenizer's
            bytes cannot be counted.
    """
    if config is None:
        return None
    if tokenizer is None:
        raise ConfigError.one("tokenizer.name", "held-out sets are scored per byte, which takes the tokenizer")
    byte_counts = token_bytes(tokenizer, vocab_size)
    prefix_id = _prefix_id(tokenizer, byte_counts) if config.context == "prefix" else None
    tasks = []
    for entry in config.sets:
        set_ = _build_set(_locate(entry, config.data_dir), tokenizer, vocab_size, prefix_id)
        tasks += [_build_task(set_, seq_len, config.micro_batch_tokens) for seq_len in config.seq_lens]
    return Validation(tasks=tasks, byte_counts=byte_counts, mesh=mesh, pin_memory=pin_memory)


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
    raise ConfigError.one(_SETS, f"{path} is not a folder of token shards (*.ds)")


def _special_id(tokenizer: "PreTrainedTokenizerBase", name: str) -> int | None:
    id_ = getattr(tokenizer, name)
    return id_ if isinstance(id_, int) else None


def _build_task(set_: LikelihoodSet, seq_len: int, micro_batch_tokens: int) -> Task:
    windows = set_.windows(seq_len)
    if not len(windows.starts):
        raise ConfigError.one(_SETS, f"no document of {set_.name} is long enough to be scored")
    return Task(
        set=set_,
        seq_len=seq_len,
        windows=windows,
        rows=pack(windows.num_inputs, seq_len),
        rows_per_forward=micro_batch_tokens // seq_len,
    )
