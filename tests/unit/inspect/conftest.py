"""Hand-made shards, config files that point to them, and the command run in process."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.inspect.command import run_inspect


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


def _write_documents(path: Path, documents: Sequence[Sequence[int]], *, loss: Sequence[int] | None = None) -> Path:
    """One shard in datatrove's format. Documents are given with their EOS."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.array([token for document in documents for token in document], "<u2")
    tokens.tofile(path)
    np.cumsum([len(document) for document in documents]).astype("<u8").tofile(f"{path}.index")
    Path(f"{path}.metadata").write_text(f"tiny|2\n{tokens.size}\n")
    if loss is not None:
        np.array(loss, "u1").tofile(f"{path}.loss")
    return path


@pytest.fixture(scope="session")
def write_documents() -> Callable[..., Path]:
    """write_documents(path, documents, loss=None)"""
    return _write_documents


@pytest.fixture(scope="session")
def letters(tiny_tokenizer: Path) -> Callable[[str], list[int]]:
    """letters(text): ids of its single bytes; the tokenizer's id 0 is the end of text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer)
    # GPT-2's spelling: printable Latin-1 stands for itself, the other bytes follow from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return lambda text: [int(tokenizer.convert_tokens_to_ids(spelling[byte])) for byte in text.encode()]


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """inspect("--rows", 1): the command's answer."""
    monkeypatch.setenv("NO_COLOR", "")

    def run(*arguments: object) -> Answer:
        code = run_inspect([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Answer(code=code, out=captured.out, err=captured.err)

    return run


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
