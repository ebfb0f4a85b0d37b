"""`tokenize` called in this process, and what it wrote read back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.data.shards import TokenPool
from trainer.tokenize.command import run_tokenize
from trainer.tokenizer import load_tokenizer

Tokenize = Callable[..., Any]


@pytest.fixture
def tokenize(answer_of: Callable[..., Any], tiny_tokenizer: Path) -> Tokenize:
    """Runs the command with the tiny tokenizer unless the arguments name another."""

    def call(*argv: str | Path) -> Any:
        is_named = any(str(argument).startswith("--tokenizer") for argument in argv)
        return answer_of(run_tokenize, *argv, *([] if is_named else ["--tokenizer.name", tiny_tokenizer]))

    return call


@pytest.fixture
def documents(tiny_tokenizer: Path) -> Callable[[Path], list[str]]:
    """Texts in a folder of shards, in their order; every one must end with EOS."""
    tokenizer = load_tokenizer(str(tiny_tokenizer))

    def read(folder: Path) -> list[str]:
        pool = TokenPool([folder])
        ids = pool.read(0, pool.num_tokens)
        parts = np.split(ids, pool.document_ends(0, pool.num_tokens))[:-1]
        assert all(part[-1] == tokenizer.eos_token_id for part in parts)
        return [str(tokenizer.decode(part[:-1])) for part in parts]

    return read


@pytest.fixture
def write_jsonl() -> Callable[..., Path]:
    def write(path: Path, texts: list[str], key: str = "text") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({key: text, "n": n}) + "\n" for n, text in enumerate(texts)))
        return path

    return write


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Every file below a folder with its bytes."""

    def read(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    return read
