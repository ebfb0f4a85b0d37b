"""Sources of rows over samples in memory; made-up conversations and tokenizers for them."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest

from trainer.data.chat.cache.record import Record
from trainer.data.chat.sample import Sample
from trainer.data.chat.selection import CachedPart, RowOptions
from trainer.data.chat.source import ChatSource
from trainer.data.drops import Drop
from trainer.data.row import Rows, RowSource

Tokens = tuple[Sequence[int], Sequence[int]]
"""Ids, and 1 where a token is a target."""


class _MemoryPart:
    def __init__(self, name: str) -> None:
        self.name = name

    def place(self, row: int) -> str:
        return f"{self.name}, line {row + 1}"


class _MemorySamples:
    """Stands for a SampleCache: sample i came from row 2 * i."""

    def __init__(self, name: str, samples: Sequence[Tokens], dropped: dict[str, Drop]) -> None:
        self._samples = [Sample(input_ids=np.array(ids, np.int32), loss=np.array(loss, bool)) for ids, loss in samples]
        self.lengths = np.array([len(ids) for ids, _ in samples], np.int64)
        self.loss_tokens = np.array([sum(loss) for _, loss in samples], np.int64)
        self.rows = 2 * np.arange(len(samples))
        longest = int(self.lengths.argmax()) if len(samples) else 0
        tops = [max(ids) for ids, _ in samples]
        self.record = Record(
            name=name,
            num_rows=len(samples) + sum(drop.count for drop in dropped.values()),
            dropped=dropped,
            num_samples=len(samples),
            split_control_tokens=0,
            tokens=int(self.lengths.sum()),
            loss_tokens=int(self.loss_tokens.sum()),
            longest=int(self.lengths.max(initial=0)),
            longest_place=f"{name}, line {2 * longest + 1}",
            max_id=max(tops, default=-1),
            max_id_place=f"{name}, line {2 * int(np.argmax(tops)) + 1}" if tops else "",
            digest=str(hash(tuple((tuple(ids), tuple(loss)) for ids, loss in samples))),
            sizes={},
        )

    def read(self, number: int) -> Sample:
        return self._samples[number]


def _make_chat_source(
    parts: Sequence[Sequence[Tokens]],
    seq_len: int,
    *,
    vocab_size: int = 1 << 30,
    dropped: dict[str, Drop] | None = None,
    names: Sequence[str] = ("a.jsonl", "b.jsonl", "c.jsonl"),
    **options: Any,
) -> ChatSource:
    settings = {
        "packing": "best_fit",
        "overflow": "truncate",
        "seed": 0,
        "shuffle": False,
        "probabilities": None,
        "stopping_strategy": "all_exhausted",
        "padding_id": 0,
    }
    cached = [
        CachedPart(part=cast(Any, _MemoryPart(name)), samples=cast(Any, _MemorySamples(name, samples, dropped or {})))
        for name, samples in zip(names, parts, strict=False)
    ]
    row_options = RowOptions(seq_len=seq_len, **(settings | options))
    return ChatSource(cached, row_options, vocab_size=vocab_size, key="data")


def _random_samples(seed: int, count: int, *, shortest: int = 2, longest: int, vocab_size: int = 50) -> list[Tokens]:
    """Random ids from 1 on; about half of the tokens are targets, the last one always is, the first one never."""
    generator = np.random.default_rng(seed)
    samples = []
    for length in generator.integers(shortest, longest, count, endpoint=True).tolist():
        loss = generator.integers(0, 2, length)
        loss[0], loss[-1] = 0, 1
        samples.append((generator.integers(1, vocab_size, length).tolist(), loss.tolist()))
    return samples


def _fill_rows(source: RowSource, epoch: int = 0, indices: Sequence[int] | None = None) -> Rows:
    chosen = np.arange(source.num_rows) if indices is None else np.array(indices)
    rows = Rows.empty(len(chosen), source.seq_len)
    source.fill(epoch, chosen, rows)
    return rows


@pytest.fixture(scope="session")
def make_chat_source() -> Callable[..., ChatSource]:
    """make_chat_source(parts, seq_len, vocab_size=, dropped=, names=, **options of RowOptions); a part is a list of
    (ids, loss); not shuffled unless asked for"""
    return _make_chat_source


@pytest.fixture(scope="session")
def random_samples() -> Callable[..., list[Tokens]]:
    """random_samples(seed, count, shortest=2, longest=, vocab_size=50)"""
    return _random_samples


@pytest.fixture(scope="session")
def fill_rows() -> Callable[..., Rows]:
    """fill_rows(source, epoch=0, indices=None): these rows, or all of the epoch"""
    return _fill_rows


@pytest.fixture(scope="session")
def made_chats() -> ModuleType:
    """The module `made_chats.py` beside this file: make_chats(count, seed), make_tokenizer(template, control),
    control_tokens(template)"""
    spec = importlib.util.spec_from_file_location("made_chats", Path(__file__).with_name("made_chats.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
