"""From `[data]` to a source."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from configs.data import DataConfig
from configs.errors import ConfigError
from trainer.data.build import build_source
from trainer.data.row import Rows, RowSource

ReadRows = Callable[..., Rows]


def _config(**table: object) -> Any:
    return TypeAdapter(DataConfig).validate_python(table)


def _build(config: Any, eos: int | None = 0, name: str | None = "tiny", vocab_size: int = 300) -> RowSource:
    return build_source(config, vocab_size=vocab_size, eos_token_id=eos, tokenizer_name=name)


def test_tokens(tiny_shards: Path, tiny_heldout: Path, read_rows: ReadRows) -> None:
    config = _config(type="tokens", paths=[tiny_shards, tiny_heldout], seq_len=32, seed=5, shuffle=False)
    source = _build(config)
    rows = read_rows(source, 0)
    tokens = np.concatenate(
        [np.fromfile(file, "<u2") for folder in (tiny_shards, tiny_heldout) for file in sorted(folder.glob("*.ds"))]
    )
    assert np.array_equal(rows.input_ids.reshape(-1), tokens[: source.num_rows * 32])
    for ids, lengths in zip(rows.input_ids, rows.segment_lengths, strict=True):
        assert np.array_equal(np.cumsum(lengths)[:-1], np.flatnonzero(ids[:-1] == 0) + 1)
    assert source.fingerprint["seed"] == 5
    assert not source.full_rows


def test_fake(read_rows: ReadRows) -> None:
    source = _build(_config(type="fake", seq_len=16, num_rows=3, length="variable"), eos=None, name=None)
    assert (source.num_rows, source.seq_len, source.full_rows) == (3, 16, False)
    assert read_rows(source, 0).input_ids.max() < 300
    assert source.description == "3 made-up rows of 16 per epoch"


def test_another_tokenizer(tiny_shards: Path) -> None:
    config = _config(type="tokens", paths=[tiny_shards], seq_len=32)
    with pytest.raises(ConfigError) as caught:
        _build(config, eos=1)
    assert caught.value.faults[0].key == "data.paths"
    assert str(tiny_shards) in caught.value.faults[0].message
    with pytest.raises(ConfigError) as caught:
        _build(config, eos=None)
    assert caught.value.faults[0].key == "tokenizer.name"
    assert _build(config, eos=None, name=None).num_rows > 0


def test_a_tokenizer_folder_may_move(tiny_shards: Path, tmp_path: Path) -> None:
    config = _config(type="tokens", paths=[tiny_shards], seq_len=32)
    prints = []
    for name in ("a/tok", "b/tok", "b/other"):
        (tmp_path / name).mkdir(parents=True)
        prints.append(_build(config, name=str(tmp_path / name)).fingerprint)
    assert prints[0] == prints[1]
    assert prints[0] != prints[2]
    assert prints[0]["tokenizer"] == {"name": "tok", "eos_token_id": 0}


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.paths: .*gone does not exist"):
        _build(_config(type="tokens", paths=[tmp_path / "gone"]))
