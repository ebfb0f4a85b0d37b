"""Shards damaged in every way: rows that keep what is promised, or an error that names a file. In time."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.data import TokensDataConfig
from configs.errors import ConfigError
from models.batch import IGNORE_INDEX
from trainer.data.build import build_source
from trainer.data.collate import collate
from trainer.data.digest import digest_rows
from trainer.data.row import Rows
from trainer.errors import RunError
from trainer.validation.sets.token_folder import TokenFolder

VOCAB, EOS, SEQ_LEN = 40, 0, 12
ENDINGS = ["", ".index", ".metadata", ".loss"]
NAMES = [f"{number:05d}_doc_shuffled.ds{ending}" for number in range(3) for ending in ENDINGS]
HALF = settings(max_examples=settings.default.max_examples // 2)
"""Each example reads a pool twice."""


def write_pool(folder: Path) -> None:
    """Three shards; the second one has a loss file, the third is as long as the first."""
    lengths = [[5, 2, 9, 4, 1, 7], [3, 3, 8], [4, 4, 4, 8, 2, 6]]
    generator = np.random.default_rng(0)
    for number, own in enumerate(lengths):
        path = folder / f"{number:05d}_doc_shuffled.ds"
        documents = [[*generator.integers(1, VOCAB, length - 1).tolist(), EOS] for length in own]
        tokens = np.array([token for document in documents for token in document], "<u2")
        tokens.tofile(path)
        np.cumsum(own).astype("<u8").tofile(f"{path}.index")
        Path(f"{path}.metadata").write_text(f"tiny|2\n{tokens.size}\n{tokens.size} T")
        if number == 1:
            (tokens % 3 > 0).astype("u1").tofile(f"{path}.loss")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pool")
    write_pool(folder)
    return folder


@contextmanager
def copied(pool: Path) -> Iterator[Path]:
    with TemporaryDirectory() as parent:
        folder = Path(parent) / "pool"
        shutil.copytree(pool, folder)
        yield folder


def read_all(folder: Path) -> int:
    """Read two epochs and score the same folder; gives the number of tokens.

    Raises:
        ConfigError, RunError: something is wrong with the folder.
    """
    config = TokensDataConfig(type="tokens", paths=[folder], seq_len=SEQ_LEN)
    source = build_source(config, vocab_size=VOCAB, eos_token_id=EOS, tokenizer_name="tiny")
    state = source.fingerprint
    for epoch in range(2):
        rows = Rows.empty(source.num_rows, SEQ_LEN)
        source.fill(epoch, np.arange(source.num_rows), rows)
        batch = collate(rows, full_rows=source.full_rows, pin_memory=False)
        assert int(rows.input_ids.min()) >= 0 and int(rows.input_ids.max()) < VOCAB
        counted = rows.labels[rows.labels != IGNORE_INDEX]
        assert not counted.size or (int(counted.min()) >= 0 and int(counted.max()) < VOCAB)
        assert [int(lengths.sum()) for lengths in rows.segment_lengths] == [SEQ_LEN] * source.num_rows
        assert batch.num_loss_tokens == counted.size
        digest_rows(rows, np.arange(source.num_rows))
    held_out = TokenFolder(
        "set",
        folder,
        byte_counts=np.ones(VOCAB, np.int64),
        eos_token_id=EOS,
        tokenizer_name="tiny",
        prefix_id=EOS,
    )
    windows = held_out.windows(8)
    for number, length in enumerate(windows.num_inputs.tolist()):
        piece = held_out.read(windows, np.array([number]))
        assert len(piece.input_ids) == len(piece.labels) == length
        assert int(piece.input_ids.min()) >= 0 and int(piece.input_ids.max()) < VOCAB
        assert ((piece.labels == IGNORE_INDEX) | ((piece.labels >= 0) & (piece.labels < VOCAB))).all()
    return state["pool"]["tokens"]


def check(folder: Path) -> bool:
    """Whether the folder is refused, by a message that names it."""
    try:
        read_all(folder)
    except (ConfigError, RunError) as error:
        assert str(folder) in str(error)
        return True
    return False


def test_the_pool_itself_is_sound(pool: Path) -> None:
    assert read_all(pool) == 28 + 14 + 28


@HALF
@given(st.data())
def test_changed_bytes(pool: Path, data: st.DataObject) -> None:
    with copied(pool) as folder:
        for _ in range(data.draw(st.integers(1, 3))):
            file = folder / data.draw(st.sampled_from(NAMES))
            content = bytearray(file.read_bytes() if file.exists() else b"\x01" * 28)
            at = data.draw(st.integers(0, len(content) - 1))
            content[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
            file.write_bytes(content)
        check(folder)


@HALF
@given(st.sampled_from(NAMES), st.binary(max_size=64))
def test_other_contents(pool: Path, name: str, content: bytes) -> None:
    with copied(pool) as folder:
        (folder / name).write_bytes(content)
        check(folder)


@HALF
@given(st.sampled_from(NAMES), st.integers(0, 64))
def test_every_cut_is_refused(pool: Path, name: str, size: int) -> None:
    """But the third line of the metadata, which is for people."""
    with copied(pool) as folder:
        file = folder / name
        content = file.read_bytes() if file.exists() else b""
        file.write_bytes(content[:size])
        needed = content[: content.rindex(b"\n")] if name.endswith(".metadata") else content
        kept = content[:size].startswith(needed)
        assert check(folder) != (kept and bool(content))


def test_flipped_bits_of_the_tokens(pool: Path) -> None:
    """Field case R47: an id that leaves the vocabulary is refused; one that stays in it, or an EOS that is lost, is
    data like any other."""
    with copied(pool) as folder:
        file = folder / NAMES[0]
        original = file.read_bytes()
        for bit in range(0, 8 * len(original), 5):
            damaged = bytearray(original)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            ids = np.frombuffer(bytes(damaged), "<u2")
            assert check(folder) == bool(ids.max() >= VOCAB or ids[4] != EOS), bit


@pytest.mark.parametrize("shift", [1, -1])
def test_an_index_that_ascends_but_is_wrong(pool: Path, shift: int) -> None:
    """What sizes cannot show: all ends but the last are off by one."""
    with copied(pool) as folder:
        index = folder / f"{NAMES[8]}.index"
        ends = np.fromfile(index, "<u8")
        ends[:-1] += np.uint64(shift % 2**64)
        ends.tofile(index)
        with pytest.raises(ConfigError, match=r"00002_doc_shuffled\.ds\.index does not fit") as caught:
            read_all(folder)
        assert "5 of 6 document ends looked at do not follow the end-of-text token 0" in str(caught.value)


def test_indices_of_two_shards_exchanged(pool: Path) -> None:
    """Both end at the same token, so their sizes and last entries agree."""
    with copied(pool) as folder:
        first, third = folder / f"{NAMES[0]}.index", folder / f"{NAMES[8]}.index"
        first.rename(folder / "aside")
        third.rename(first)
        (folder / "aside").rename(third)
        assert check(folder)


def test_a_document_here_and_there_without_eos_is_let_through(pool: Path) -> None:
    with copied(pool) as folder:
        file = folder / NAMES[8]
        tokens, ends = np.fromfile(file, "<u2"), np.fromfile(f"{file}.index", "<u8").astype(int)
        tokens[ends[1:3] - 1] = 7
        tokens.tofile(file)
        assert not check(folder)
        tokens[ends[3:5] - 1] = 7
        tokens.tofile(file)
        assert check(folder)


@pytest.mark.parametrize("name", NAMES[:4] + NAMES[8:11])
@pytest.mark.parametrize("kind", ["folder", "loop", "nowhere", "pipe", "device"])
def test_what_is_no_file(pool: Path, name: str, kind: str) -> None:
    """A pipe has no writer, a device no end: neither may be waited for."""
    with copied(pool) as folder:
        file = folder / name
        file.unlink(missing_ok=True)
        make: dict[str, Callable[[], None]] = {
            "folder": file.mkdir,
            "loop": lambda: file.symlink_to(file),
            "nowhere": lambda: file.symlink_to(folder / "nowhere"),
            "pipe": lambda: os.mkfifo(file),
            "device": lambda: file.symlink_to("/dev/zero"),
        }
        make[kind]()
        assert check(folder)


@HALF
@given(st.text(st.characters(exclude_characters="/\x00", exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_strange_files_beside_the_shards(pool: Path, name: str) -> None:
    """What the folder holds besides is not opened; a strange name of a shard changes nothing."""
    with copied(pool) as folder:
        try:
            os.mkfifo(folder / f"{name}.txt")
            for ending in ENDINGS[:3]:
                shutil.copy(folder / f"{NAMES[0]}{ending}", folder / f"{name}.ds{ending}")
        except OSError:  # a name that this file system does not take
            return
        if "chunk_shuffled" not in name:
            assert read_all(folder) == 28 + 14 + 28 + 28
