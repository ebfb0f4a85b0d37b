"""The cache of tokenised sets: found by whom it serves, made anew when damaged."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.errors import RunError
from trainer.validation.sets.text_set import TextSet

ROWS = [{"text": "the cat"}, {"text": "a dog"}]


class Counter:
    """A Track that counts the times that something was tokenised."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        self.times += not done


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    path = tmp_path / "set.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return path


def content(set_: TextSet) -> list[tuple[list[int], list[int], int]]:
    windows = set_.windows(4)
    read = (set_.read(windows, np.array([number])) for number in range(len(windows.sequences)))
    return [(piece.input_ids.tolist(), piece.labels.tolist(), int(piece.num_bytes[0])) for piece in read]


def test_a_set_is_tokenised_once(make_set: Callable[..., TextSet], rows_file: Path, counter: Counter) -> None:
    first, second = (make_set(rows_file, track=counter) for _ in range(2))
    assert counter.times == 1
    assert content(first) == content(second)
    assert first.digest == second.digest
    # Lengths and context are none of its concerns.
    assert make_set(rows_file, track=counter, prefix_id=7).digest != first.digest
    assert counter.times == 1


@pytest.mark.parametrize("change", [{"family": "byte-level BPE, NFC"}, {"max_documents": 1}])
def test_whoever_would_have_other_tokens_has_a_cache_of_its_own(
    make_set: Callable[..., TextSet], rows_file: Path, counter: Counter, change: dict[str, Any]
) -> None:
    make_set(rows_file, track=counter)
    make_set(rows_file, track=counter, **change)
    assert counter.times == 2


def test_another_file_of_the_same_size_is_another_set(
    make_set: Callable[..., TextSet], rows_file: Path, counter: Counter
) -> None:
    before = make_set(rows_file, track=counter)
    status = rows_file.stat()
    rows_file.write_text(rows_file.read_text().replace("cat", "cow"))
    os.utime(rows_file, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = make_set(rows_file, track=counter)
    assert counter.times == 2
    assert before.digest != after.digest


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("name", ["tokens.bin", "sequences.bin", "cache.json"])
@pytest.mark.parametrize("damage", [flip, shorten, Path.unlink])
def test_a_damaged_cache_is_made_anew(
    make_set: Callable[..., TextSet],
    rows_file: Path,
    tmp_path: Path,
    counter: Counter,
    name: str,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = content(make_set(rows_file, track=counter))
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if not path.name.startswith("."))
    if (name, damage) == ("cache.json", flip):
        (folder / name).write_text((folder / name).read_text().replace('"num_tokens": ', '"num_tokens": 1'))
    else:
        damage(folder / name)
    with caplog.at_level(logging.WARNING):
        assert content(make_set(rows_file, track=counter)) == expected
    assert counter.times == 2
    assert "is damaged and is made anew" in caplog.text
    make_set(rows_file, track=counter)
    assert counter.times == 2
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


def test_a_full_disk_is_no_fault_of_the_config(
    make_set: Callable[..., TextSet], rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer.validation.sets.cache._Tally.write", fail)
    with pytest.raises(RunError, match=r"No space left on device.*give another folder as val\.cache_dir"):
        make_set(rows_file)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_disk_that_is_full_when_the_buffers_are_written_is_named_too(
    make_set: Callable[..., TextSet], rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows fit into the buffer of their file: writing them succeeds, and closing the file fails again."""
    open_as_asked = Path.open

    def open_on_full_disk(path: Path, mode: str = "r", **options: Any) -> Any:
        return open_as_asked(Path("/dev/full"), "wb") if mode == "xb" else open_as_asked(path, mode, **options)

    monkeypatch.setattr(Path, "open", open_on_full_disk)
    with pytest.raises(RunError, match=r"No space left on device.*give another folder as val\.cache_dir"):
        make_set(rows_file)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_million_documents_are_cut_without_a_loop(
    make_set: Callable[..., TextSet], rows_file: Path, tmp_path: Path
) -> None:
    """Arrays of a set of a million documents in place of those of two; a loop over them would take many seconds."""
    set_ = make_set(rows_file)
    count = 1_000_000
    sequences = np.zeros(count, set_._sequences.dtype)
    sequences["end"] = np.arange(1, count + 1) * 3
    sequences["document"] = np.arange(count)
    set_._sequences = sequences
    set_._ids = np.zeros(3 * count, np.int32)
    windows = set_.windows(2)
    assert len(windows.sequences) == count
    assert set_.read(windows, np.array([count - 1])).labels.tolist() == [0]


@pytest.mark.parametrize("most_chars", [1, 20])
def test_a_set_of_many_batches_is_that_of_one(
    make_set: Callable[..., TextSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_chars: int
) -> None:
    rows = [
        {"context": "n", "choices": ["x", " "], "answer": 0},  # n and a space are one token: nothing is scored
        {"context": "q ", "choices": ["a", "", "b"], "answer": 1},
        *({"context": "t", "choices": ["he", "o", f"{number}"], "answer": number % 3} for number in range(5)),
        {"choices": ["a", "the the"], "answer": 1},
    ]
    whole = make_set(rows, prefix_id=300)
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr("trainer.validation.sets.encode._BATCH_CHARS", most_chars)
    parts = make_set(rows, prefix_id=300)
    assert whole.digest == parts.digest
    assert content(whole) == content(parts)
    # t and h merge in the first option of five: each document counts once.
    told = [note.partition(": ")[2].rpartition(" (first: ")[0] or note for note in parts.notes]
    assert told[-1] == "documents whose context ends within a token, which counts as context as a whole: 5"
    assert len(parts.notes) == 3
    assert sorted(whole.notes) == sorted(parts.notes)


def test_left_out_rows_are_told_in_their_order(make_set: Callable[..., TextSet]) -> None:
    rows = [{"context": "n", "continuation": " "}, {"context": "a ", "continuation": ""}]
    rows += [{"context": "a", "continuation": "b"}, {"context": "n", "continuation": " "}]
    first, second = make_set(rows).notes
    assert "because no token stands for the continuation alone: 2 (first: " in first
    assert first.endswith("rows.jsonl, line 1)")
    assert "because a text is empty: 1 (" in second
    assert second.endswith("rows.jsonl, line 2)")
