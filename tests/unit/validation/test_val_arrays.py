"""`val.save_arrays`: the file of a set and step."""

import errno
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from trainer.errors import RunError
from trainer.validation.arrays import write_arrays
from trainer.validation.windows import DocumentScores


def make_records(correct: list[bool] | None = None, option_nats: list[list[float]] | None = None) -> DocumentScores:
    return DocumentScores(
        documents=np.array([0, 3]),
        nats=np.array([1.5, 0.1]),
        num_tokens=np.array([7, 2]),
        num_bytes=np.array([30, 9]),
        correct=None if correct is None else np.array(correct),
        option_nats=None if option_nats is None else [np.array(nats) for nats in option_nats],
    )


def test_one_record_per_document_and_length(tmp_path: Path) -> None:
    path = tmp_path / "val" / "step_5" / "set.parquet"
    write_arrays(path, {1024: make_records(), 8192: make_records()})
    table = pq.read_table(path)
    assert [f"{field.name}: {field.type}" for field in table.schema] == [
        "seq_len: int32",
        "document: int64",
        "nats: double",
        "tokens: int64",
        "bytes: int64",
        "correct: bool",
        "option_nats: list<element: double>",
    ]
    rest = {"correct": None, "option_nats": None}
    documents = [
        {"document": 0, "nats": 1.5, "tokens": 7, "bytes": 30} | rest,
        {"document": 3, "nats": 0.1, "tokens": 2, "bytes": 9} | rest,
    ]
    assert table.to_pylist() == [{"seq_len": length} | row for length in (1024, 8192) for row in documents]
    assert list(path.parent.iterdir()) == [path]


def test_options_and_right_and_wrong(tmp_path: Path) -> None:
    path = tmp_path / "set.parquet"
    write_arrays(path, {64: make_records([True, False], [[1.5, 2.0, 1e300], [0.1]])})
    table = pq.read_table(path)
    assert table["correct"].to_pylist() == [True, False]
    assert table["option_nats"].to_pylist() == [[1.5, 2.0, 1e300], [0.1]]


def test_a_length_at_which_nothing_was_scored_has_no_rows(tmp_path: Path) -> None:
    none = np.empty(0, np.int64)
    empty = DocumentScores(
        documents=none, nats=none.astype(float), num_tokens=none, num_bytes=none, correct=none > 0, option_nats=[]
    )
    write_arrays(tmp_path / "set.parquet", {2: empty, 64: make_records([True, True], [[1.0], [2.0]])})
    assert pq.read_table(tmp_path / "set.parquet")["seq_len"].to_pylist() == [64, 64]


def test_the_same_scores_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_arrays(tmp_path / name, {64: make_records([True, False])})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_round_that_is_repeated_replaces_its_file(tmp_path: Path) -> None:
    path = tmp_path / "set.parquet"
    write_arrays(path, {64: make_records(), 128: make_records()})
    write_arrays(path, {64: make_records()})
    assert pq.read_table(path).num_rows == 2


def test_a_full_disk_is_named_and_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "set.parquet"
    write_arrays(path, {64: make_records()})
    before = path.read_bytes()

    def fail(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(RunError, match=r"set\.parquet cannot be written \(No space left on device\)"):
        write_arrays(path, {64: make_records(), 128: make_records()})
    assert path.read_bytes() == before
