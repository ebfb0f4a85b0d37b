"""Sources of rows, and shards without contents."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from trainer.data.row import Rows, RowSource
from trainer.data.shards import TokenPool
from trainer.data.tokens import TokensSource


def _write_holes(folder: Path, *, shards: int, tokens: int, documents: int) -> Path:
    """Sparse shards of this many tokens and documents each, which take no disk: all zeros but the last document end."""
    for number in range(shards):
        path = folder / f"{number:05d}.ds"
        with path.open("wb") as file:
            file.truncate(2 * tokens)
        with Path(f"{path}.index").open("wb") as file:
            file.truncate(8 * documents)
            file.seek(8 * (documents - 1))
            file.write(tokens.to_bytes(8, "little"))
        Path(f"{path}.metadata").write_text(f"tiny|2\n{tokens}\n1 TT")
    return folder


def _make_source(paths: list[Path], seq_len: int, **options: object) -> TokensSource:
    settings = {"vocab_size": 1 << 32, "seed": 0, "shuffle": True, "document_masking": True, "tokenizer": {}} | options
    return TokensSource(TokenPool(paths), seq_len=seq_len, **settings)  # type: ignore[arg-type]


def _read_rows(source: RowSource, epoch: int, indices: Sequence[int] | None = None) -> Rows:
    chosen = np.arange(source.num_rows) if indices is None else np.array(indices)
    rows = Rows.empty(len(chosen), source.seq_len)
    source.fill(epoch, chosen, rows)
    return rows


@pytest.fixture(scope="session")
def write_holes() -> Callable[..., Path]:
    """write_holes(folder, shards=, tokens=, documents=): gives the folder"""
    return _write_holes


@pytest.fixture(scope="session")
def make_source() -> Callable[..., TokensSource]:
    """make_source(paths, seq_len, **options of TokensSource)"""
    return _make_source


@pytest.fixture(scope="session")
def read_rows() -> Callable[..., Rows]:
    """read_rows(source, epoch, indices=None): these rows, or all of the epoch"""
    return _read_rows
