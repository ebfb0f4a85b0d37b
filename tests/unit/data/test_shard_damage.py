"""Damaged and incomplete shards: an error that names the file, never a crash, a hang or other tokens."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from configs.errors import ConfigError
from trainer.data.row import RowError
from trainer.data.shards import TokenPool

WriteShard = Callable[..., Path]
DOCUMENTS = [[1, 2, 0], [3, 0], [4, 5, 6, 0], [7, 0]]


@pytest.fixture
def shard(tmp_path: Path, write_shard: WriteShard) -> Path:
    return write_shard(tmp_path / "00000_doc_shuffled.ds", DOCUMENTS, loss=[1] * 11)


def _fault(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        TokenPool([path])
    assert [fault.key for fault in caught.value.faults] == ["data.paths"]
    return caught.value.faults[0].message


@pytest.mark.parametrize("ending", ["", ".index", ".loss", ".metadata"])
@pytest.mark.parametrize("cut", [1, 2, 8, 1000])
def test_every_file_cut_short(shard: Path, ending: str, cut: int) -> None:
    file = Path(f"{shard}{ending}")
    content = file.read_bytes()
    if ending == ".metadata":  # its third line, a rounded count for people, is not read
        content = content[: content.rindex(b"\n")]
    file.write_bytes(content[:-cut])
    message = _fault(shard.parent)
    assert str(shard) in message


@pytest.mark.parametrize("ending", ["", ".index", ".loss"])
def test_every_file_too_long(shard: Path, ending: str) -> None:
    with Path(f"{shard}{ending}").open("ab") as file:
        file.write(bytes(8))
    assert f"{shard}{ending}" in _fault(shard.parent)


def test_a_cut_shard_says_both_numbers(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-4])
    assert _fault(shard.parent) == (
        f"{shard} is cut short: it has 18 bytes, but {shard.name}.metadata says 11 tokens of 2 bytes = 22"
    )


@pytest.mark.parametrize(
    ("ending", "words"),
    [(".index", "No such file"), (".metadata", "save_final_metadata=True"), ("", "beside it")],
)
def test_missing_files(shard: Path, ending: str, words: str) -> None:
    Path(f"{shard}{ending}").unlink()
    message = _fault(shard.parent)
    assert str(shard) in message
    assert words in message


@pytest.mark.parametrize(
    "text",
    ["", "tiny", "tiny\n11", "tiny|3\n11", "tiny|2", "tiny|2\n", "tiny|2\n-1", "tiny|2\n1e1", "tiny|2\n²", "\xff"],
)
def test_metadata_that_says_no_width_or_count(shard: Path, text: str) -> None:
    Path(f"{shard}.metadata").write_bytes(text.encode("latin-1", "replace"))
    assert f"{shard}.metadata" in _fault(shard.parent)


def test_wrong_width_in_the_metadata(shard: Path) -> None:
    Path(f"{shard}.metadata").write_text("tiny|4\n11")
    assert "11 tokens of 4 bytes = 44" in _fault(shard.parent)


def test_tokenizer_names_with_bars(shard: Path) -> None:
    Path(f"{shard}.metadata").write_text("Unknown Tokenizer|2|2\n11")
    assert TokenPool([shard]).num_tokens == 11


def test_nothing_to_read(tmp_path: Path, write_shard: WriteShard) -> None:
    assert _fault(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'} does not exist"
    (tmp_path / "empty").mkdir()
    assert _fault(tmp_path / "empty") == f"{tmp_path / 'empty'} holds no .ds file"
    (tmp_path / "notes.txt").write_text("x")
    assert "neither a folder nor a .ds file" in _fault(tmp_path / "notes.txt")
    write_shard(tmp_path / "void" / "00000.ds", [])
    assert "hold no token" in _fault(tmp_path / "void")


def test_all_bad_shards_are_named(tmp_path: Path, write_shard: WriteShard) -> None:
    bad = [write_shard(tmp_path / f"{number:05d}.ds", DOCUMENTS) for number in range(3)]
    for path in (bad[0], bad[2]):
        Path(f"{path}.index").unlink()
    with pytest.raises(ConfigError) as caught:
        TokenPool([tmp_path])
    assert [str(path) in fault.message for path, fault in zip((bad[0], bad[2]), caught.value.faults, strict=True)] == [
        True,
        True,
    ]


@pytest.mark.parametrize(
    "ends", [[3, 2, 9, 11], [9, 5, 3, 11], [3, 5, 12, 11], [2**63, 5, 9, 11], [3, 2**64 - 1, 9, 11], [12, 11]]
)
def test_an_index_that_does_not_ascend(shard: Path, ends: list[int]) -> None:
    np.array(ends, "<u8").tofile(f"{shard}.index")
    pool = TokenPool([shard])
    with pytest.raises(RowError, match=r"\.ds\.index is damaged"):
        pool.document_ends(0, 11)


@pytest.mark.parametrize("first", [12, 2**63, 2**64 - 1])
def test_a_first_document_beyond_the_shard(shard: Path, first: int) -> None:
    np.array([first, 5, 9, 11], "<u8").tofile(f"{shard}.index")
    with pytest.raises(ConfigError, match=r"\.ds\.index is damaged"):
        TokenPool([shard]).check_tokenizer(0, "tiny")


def test_every_flipped_bit_of_a_small_index(shard: Path) -> None:
    """Each flip is an error or leaves a list of ends that could be right; nothing else comes out."""
    original = Path(f"{shard}.index").read_bytes()
    refused = 0
    for bit in range(8 * len(original)):
        damaged = bytearray(original)
        damaged[bit // 8] ^= 1 << bit % 8
        Path(f"{shard}.index").write_bytes(damaged)
        try:
            pool = TokenPool([shard])
            pool.check_tokenizer(0, "tiny")
            ends = pool.document_ends(0, 11)
        except (ConfigError, RowError) as error:
            assert f"{shard}" in str(error)
            refused += 1
        else:
            assert ends[-1] == 11
            assert (np.diff(ends, prepend=0) > 0).all()
    assert refused > 0.9 * 8 * len(original)


@pytest.mark.parametrize("ending", ["", ".index", ".loss"])
@pytest.mark.parametrize("size", [0, 1, None])
def test_files_that_shrink_or_vanish_after_the_start(shard: Path, ending: str, size: int | None) -> None:
    pool = TokenPool([shard])
    file = Path(f"{shard}{ending}")
    if size is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(RowError) as caught:
        pool.read(0, 11)
    assert str(shard) in str(caught.value)
