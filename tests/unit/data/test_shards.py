"""The token pool over real datatrove shards and hand-made ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from configs.errors import ConfigError
from trainer.data import shards
from trainer.data.shards import TokenPool

WriteShard = Callable[..., Path]


def test_reads_what_the_released_datatrove_wrote(tiny_shards: Path) -> None:
    """Field case R48: the installed datatrove's .ds + .ds.index are read as they are."""
    files = sorted(tiny_shards.glob("*.ds"))
    assert len(files) >= 2
    tokens = np.concatenate([np.fromfile(file, "<u2") for file in files]).astype(np.int64)
    sizes = [file.stat().st_size // 2 for file in files]
    starts = np.cumsum([0, *sizes[:-1]])
    ends = np.concatenate(
        [np.fromfile(f"{file}.index", "<u8").astype(np.int64) + s for file, s in zip(files, starts, strict=True)]
    )
    pool = TokenPool([tiny_shards])
    pool.check_tokenizer(0, "tiny")
    assert (pool.num_tokens, pool.num_documents) == (tokens.size, 200)
    assert np.array_equal(pool.read(0, tokens.size), tokens)
    assert np.array_equal(pool.document_ends(0, tokens.size), ends)
    assert (tokens[ends - 1] == 0).all()
    assert pool.loss_mask(0, tokens.size) is None
    assert pool.locate(int(starts[1]) + 5) == (files[1], 5)
    assert pool.locate(int(starts[1]) - 1) == (files[0], sizes[0] - 1)


def test_folder_order_then_file_order(tmp_path: Path, write_shard: WriteShard) -> None:
    write_shard(tmp_path / "z" / "00001.ds", [[3, 0]])
    write_shard(tmp_path / "z" / "00000.ds", [[1, 2, 0]])
    write_shard(tmp_path / "a" / "00000.ds", [[9, 0]], width=4)
    single = write_shard(tmp_path / "single.ds", [[7, 0]])
    pool = TokenPool([tmp_path / "z", tmp_path / "a", single])
    assert pool.read(0, 9).tolist() == [1, 2, 0, 3, 0, 9, 0, 7, 0]
    assert pool.read(2, 4).tolist() == [0, 3, 0, 9]
    assert pool.document_ends(0, 9).tolist() == [3, 5, 7, 9]
    assert pool.document_ends(3, 7).tolist() == [5, 7]
    assert pool.document_ends(5, 6).tolist() == []
    assert pool.document_ends(4, 4).tolist() == []
    with pytest.raises(IndexError):
        pool.read(5, 5)
    with pytest.raises(IndexError):
        pool.locate(9)


@pytest.mark.parametrize("token", [65535, 65536, 65600, 2**32 - 1])
def test_wide_ids_survive(tmp_path: Path, write_shard: WriteShard, token: int) -> None:
    """Field case R45: id 65600 in a uint32 shard reads back as 65600, never as 64."""
    write_shard(tmp_path / "00000.ds", [[token, 5, 0]], width=4)
    assert TokenPool([tmp_path]).read(0, 3).tolist() == [token, 5, 0]


def test_empty_shards_and_empty_documents_are_passed_over(tmp_path: Path, write_shard: WriteShard) -> None:
    write_shard(tmp_path / "00000.ds", [])
    write_shard(tmp_path / "00001.ds", [[], [1, 0], [], [], [2, 0], []])
    write_shard(tmp_path / "00002.ds", [])
    write_shard(tmp_path / "00003.ds", [[3, 0]])
    pool = TokenPool([tmp_path])
    assert pool.read(0, 6).tolist() == [1, 0, 2, 0, 3, 0]
    assert pool.document_ends(0, 6).tolist() == [2, 4, 6]
    assert pool.locate(4) == (tmp_path / "00003.ds", 0)
    pool.check_tokenizer(0, "tiny")


def test_loss_file(tmp_path: Path, write_shard: WriteShard) -> None:
    write_shard(tmp_path / "00000.ds", [[1, 2, 0]], loss=[0, 1, 1])
    write_shard(tmp_path / "00001.ds", [[3, 0]])
    pool = TokenPool([tmp_path])
    mask = pool.loss_mask(0, 5)
    assert mask is not None
    assert mask.tolist() == [False, True, True, True, True]


def test_shards_of_another_tokenizer(tmp_path: Path, write_shard: WriteShard) -> None:
    good = write_shard(tmp_path / "good" / "00000.ds", [[1, 0], [2, 9]])
    bad = write_shard(tmp_path / "bad" / "00000.ds", [[1, 9]], tokenizer="other")
    pool = TokenPool([good.parent, bad.parent])
    with pytest.raises(ConfigError) as caught:
        pool.check_tokenizer(0, "mine")
    assert [fault.key for fault in caught.value.faults] == ["data.paths"]
    message = caught.value.faults[0].message
    assert str(bad) in message
    for part in ("token 9", "token 0", "mine", "'other'"):
        assert part in message
    with pytest.raises(ConfigError) as caught:
        pool.check_tokenizer(9, "mine")
    assert str(good) in caught.value.faults[0].message


def test_cut_documents_do_not_look_like_another_tokenizer(tmp_path: Path, write_shard: WriteShard) -> None:
    """datatrove cuts a final part without loss, and chunks anywhere: then any of the first ends may be the EOS."""
    write_shard(tmp_path / "a" / "00000_chunk_shuffled.ds", [[1, 2], [3, 0], [4, 5]])
    write_shard(tmp_path / "b" / "00000.ds", [[1, 2], [3, 0]], loss=[1, 1, 1, 1])
    pool = TokenPool([tmp_path / "a", tmp_path / "b"])
    pool.check_tokenizer(0, "tiny")
    assert pool.chunk_shuffled == tmp_path / "a" / "00000_chunk_shuffled.ds"
    with pytest.raises(ConfigError) as caught:
        pool.check_tokenizer(7, "tiny")
    assert len(caught.value.faults) == 2


def test_fingerprint_sees_changes_but_not_moves(tmp_path: Path, write_shard: WriteShard) -> None:
    documents = [[*range(1, 3000), 0], [*range(1, 4000), 0]]
    first = write_shard(tmp_path / "a" / "00000.ds", documents)
    second = write_shard(tmp_path / "b" / "00000.ds", documents)
    reference = TokenPool([first.parent]).fingerprint
    assert TokenPool([second.parent]).fingerprint == reference
    assert reference["tokens"] == 7000
    changed = [documents[0], [7, *documents[1][1:]]]
    seen = set()
    for name, change in {
        "contents": lambda: write_shard(second, changed),
        "sizes": lambda: write_shard(second, documents, loss=[1] * 7000),
        "metadata": lambda: write_shard(second, documents, tokenizer="other"),
        "names": lambda: write_shard(tmp_path / "b" / "00001.ds", documents),
    }.items():
        for file in second.parent.iterdir():
            file.unlink()
        change()
        fingerprint = TokenPool([second.parent]).fingerprint
        assert fingerprint[name] != reference[name]
        seen.add(str(fingerprint))
    assert len(seen) == 4


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors through /proc")
def test_open_files_stay_few(tmp_path: Path, write_shard: WriteShard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each map holds a descriptor; a pool of thousands of shards must not run out of them."""
    monkeypatch.setattr(shards, "_MAX_MAPPED", 4)
    for number in range(40):
        write_shard(tmp_path / f"{number:05d}.ds", [[number + 1, 0]])
    pool = TokenPool([tmp_path])
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert pool.read(0, 80)[::2].tolist() == list(range(1, 41))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4 * 2


def test_a_pool_of_ten_trillion_tokens_opens_at_once(tmp_path: Path, write_holes: Callable[..., Path]) -> None:
    """Sparse files: nothing of the size is read. The index alone would be 80 GB."""
    documents, tokens = 10**9, 10**12
    pool = TokenPool([write_holes(tmp_path, shards=10, tokens=tokens, documents=documents)])
    pool.check_tokenizer(0, "tiny")
    assert pool.num_tokens == 10**13
    assert pool.num_documents == 10**10
    assert pool.fingerprint["tokens"] == 10**13
    assert pool.read(10**13 - 3, 3).tolist() == [0, 0, 0]
    assert pool.document_ends(10**12 - 5, 10**12 + 5).tolist() == [10**12]
    assert pool.document_ends(10**13 - 5, 10**13).tolist() == [10**13]
