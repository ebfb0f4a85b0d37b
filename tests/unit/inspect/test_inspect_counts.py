"""Counts against brute force over the rows of an epoch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from configs.data import FakeDataConfig, TokensDataConfig
from models.batch import IGNORE_INDEX
from trainer.data.build import build_source
from trainer.data.fake import FakeSource
from trainer.data.row import RowError, Rows, RowSource
from trainer.data.tokens import TokensSource
from trainer.inspect import counts as counting
from trainer.inspect.counts import Counts, count


def _count(source: RowSource, *, epoch: int = 0, scan: bool = False) -> Counts:
    return count(source, epoch=epoch, scan=scan, track=lambda *progress: None)


def _loss_tokens(source: RowSource, epoch: int) -> int:
    rows = Rows.empty(source.num_rows, source.seq_len)
    source.fill(epoch, np.arange(source.num_rows), rows)
    return int((rows.labels != IGNORE_INDEX).sum())


@pytest.fixture
def pool(tmp_path: Path, write_shard: Callable[..., Path]) -> tuple[Path, list[int]]:
    """Three shards, the second with a loss file, and the lengths of their documents."""
    generator = np.random.default_rng(0)
    lengths = []
    for shard in range(3):
        sizes = generator.integers(1, 60, 40).tolist()
        lengths += sizes
        loss = generator.integers(0, 2, sum(sizes)).tolist() if shard == 1 else None
        documents = [[*generator.integers(1, 300, size - 1).tolist(), 0] for size in sizes]
        write_shard(tmp_path / "pool" / f"{shard}.ds", documents, loss=loss)
    return tmp_path / "pool", lengths


def _tokens(folder: Path, seq_len: int, **options: object) -> TokensSource:
    config = TokensDataConfig(type="tokens", paths=[folder], seq_len=seq_len, **options)  # type: ignore[arg-type]
    source = build_source(config, vocab_size=300, eos_token_id=0, tokenizer_name="tiny")
    assert isinstance(source, TokensSource)
    return source


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("seq_len", [7, 64, 1000])
def test_tokens_against_brute_force(pool: tuple[Path, list[int]], seq_len: int, shuffle: bool) -> None:
    folder, lengths = pool
    source = _tokens(folder, seq_len, shuffle=shuffle)
    for epoch in range(3):
        counts = _count(source, epoch=epoch)
        assert counts.loss_tokens == _loss_tokens(source, epoch)
        assert (counts.rows, counts.positions) == (sum(lengths) // seq_len, sum(lengths) // seq_len * seq_len)
        assert counts.left_out_tokens == sum(lengths) % seq_len
        assert (counts.documents, counts.tokens, counts.notes) == (120, sum(lengths), [])
        found = counts.lengths
        assert found is not None
        assert counts.exact_lengths
        assert (found.counted, found.longest, found.total) == (120, max(lengths), sum(lengths))
        assert found.longer_than_row == sum(length > seq_len for length in lengths)
        assert found.bins == [sum(1 << i <= length < 2 << i for length in lengths) for i in range(6)]


def test_blocks_smaller_than_the_files_give_the_same(
    pool: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _tokens(pool[0], 64)
    whole = _count(source)
    monkeypatch.setattr(counting, "_BLOCK_ENDS", 7)
    monkeypatch.setattr(counting, "_BLOCK_BYTES", 100)
    assert _count(source) == whole


def test_what_is_too_long_to_read_is_left_open_and_said(
    pool: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _tokens(pool[0], 64)
    whole = _count(source)
    monkeypatch.setattr(counting, "MAX_LOSS_BYTES", 100)
    monkeypatch.setattr(counting, "MAX_ENDS", 100)
    monkeypatch.setattr(counting, "_SAMPLED_BLOCKS", 6)
    monkeypatch.setattr(counting, "_SAMPLED_ENDS", 5)
    sampled = _count(source)
    assert sampled.loss_tokens is None
    assert sampled.documents == 120
    assert sampled.lengths is not None
    assert (sampled.lengths.counted, sampled.exact_lengths) == (30, False)
    expected = [length for low in range(0, 120, 20) for length in pool[1][low : low + 5]]
    assert (sampled.lengths.total, sampled.lengths.longest) == (sum(expected), max(expected))
    assert [note.partition(":")[0] for note in sampled.notes] == [
        "loss tokens are not counted",
        "document lengths are those of 30 documents all over the pool; --scan reads all",
    ]
    assert _count(source, scan=True) == whole


def test_chunk_shuffled_shards_have_no_documents_to_count(tmp_path: Path, write_shard: Callable[..., Path]) -> None:
    write_shard(tmp_path / "0_chunk_shuffled.ds", [[1, 2, 0]] * 9)
    counts = _count(_tokens(tmp_path, 4, document_masking=False))
    assert (counts.documents, counts.lengths, counts.loss_tokens) == (None, None, 24)
    assert "chunk-shuffled" in counts.notes[0]


def test_an_index_that_does_not_ascend_is_named(tmp_path: Path, write_shard: Callable[..., Path]) -> None:
    path = write_shard(tmp_path / "0.ds", [[1, 2, 0]] * 9)
    source = _tokens(tmp_path, 4)
    index = np.fromfile(f"{path}.index", "<u8")
    index[4] = 2
    index.tofile(f"{path}.index")
    with pytest.raises(RowError, match=r"0\.ds\.index is damaged"):
        _count(source)


def _fake(**options: object) -> FakeSource:
    config = FakeDataConfig(type="fake", seq_len=16, num_rows=40, **options)  # type: ignore[arg-type]
    source = build_source(config, vocab_size=50, eos_token_id=None, tokenizer_name=None)
    assert isinstance(source, FakeSource)
    return source


def test_fake_rows_of_one_document() -> None:
    counts = _count(_fake())
    assert counts.lengths is not None
    assert (counts.documents, counts.loss_tokens, counts.lengths.bins) == (40, 640, [0, 0, 0, 0, 40])


def test_fake_rows_of_several_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    source = _fake(length="variable")
    rows = Rows.empty(40, 16)
    source.fill(2, np.arange(40), rows)
    counts = _count(source, epoch=2)
    assert counts.lengths is not None
    assert counts.documents == counts.lengths.counted == sum(lengths.size for lengths in rows.segment_lengths)
    assert counts.lengths.longest == max(int(lengths.max()) for lengths in rows.segment_lengths)
    monkeypatch.setattr(counting, "MAX_FILLED_TOKENS", 160)
    sampled = _count(source, epoch=2)
    assert sampled.lengths is not None
    assert sampled.documents is None
    assert sampled.lengths.counted == sum(lengths.size for lengths in rows.segment_lengths[:10])
    assert sampled.notes == ["document lengths are those of the first 10 rows; --scan makes all"]
    assert _count(source, epoch=2, scan=True) == counts
