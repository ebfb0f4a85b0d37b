"""Config files that point to hand-made shards, and the command run in process."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trainer.inspect.command import run_inspect


@pytest.fixture(scope="session")
def letters(tiny_tokenizer: Path) -> Callable[[str], list[int]]:
    """letters(text): ids of its single bytes; the tokenizer's id 0 is the end of text."""
    from transformers import AutoTokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer)
    spelling = bytes_to_unicode()
    return lambda text: [int(tokenizer.convert_tokens_to_ids(spelling[byte])) for byte in text.encode()]


@pytest.fixture
def inspect(answer_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """inspect("--rows", 1): the command's answer."""
    monkeypatch.setenv("NO_COLOR", "")
    return partial(answer_of, run_inspect)


@pytest.fixture
def tiny_toml(tmp_path: Path, tiny_tokenizer: Path) -> Callable[..., Path]:
    """tiny_toml(shards, seq_len=5, ...): a config without model, rows in order; extra keys go into [data]."""

    def write(shards: Path, **data: object) -> Path:
        table = {"type": "tokens", "paths": [str(shards)], "seq_len": 5, "shuffle": False, "batch_size": 2} | data
        lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        path = tmp_path / "tiny.toml"
        path.write_text(f"[tokenizer]\nname = {json.dumps(str(tiny_tokenizer))}\n[data]\n" + "\n".join(lines) + "\n")
        return path

    return write
