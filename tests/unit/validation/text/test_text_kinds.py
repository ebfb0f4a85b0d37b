"""Kinds by columns, and rows that cannot be used: named with file and line."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.errors import ConfigError
from trainer.data.errors import DataError
from trainer.validation.sets.kinds import find_kind
from trainer.validation.sets.text_set import TextSet

ROWS: dict[str, dict[str, Any]] = {
    "ppl": {"text": "the cat"},
    "ctxcont": {"context": "the ", "continuation": "cat"},
    "pairs": {"context": "a", "chosen": " cat", "rejected": " dog"},
    "choices": {"context": "a", "choices": [" cat", " dog", " cow"], "answer": 2},
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "json", "parquet", "folder"])
def test_every_kind_from_every_file(make_set: Callable[..., TextSet], tmp_path: Path, kind: str, ending: str) -> None:
    row = {"id": 7, **ROWS[kind]}
    content = f"{json.dumps(row)}\n".encode() * 2
    path = tmp_path / ("set" if ending == "folder" else f"set.{ending}")
    match ending:
        case "jsonl.gz":
            path.write_bytes(gzip.compress(content))
        case "parquet":
            pq.write_table(pa.Table.from_pylist([row, row]), path)
        case "folder":
            path.mkdir()
            for number in range(2):
                pq.write_table(pa.Table.from_pylist([row]), path / f"part-{number}.parquet")
        case _:
            path.write_bytes(content)
    set_ = make_set(path)
    assert set_.kind == kind
    assert set_.num_documents == 2
    assert set_.num_sequences == 2 * {"ppl": 1, "ctxcont": 1, "pairs": 2, "choices": 3}[kind]
    assert set_.wants_hits == (kind == "ctxcont")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["body"], "a.jsonl has the columns body, and they make no kind of set; the kinds take text (ppl); context, "),
        ([], "a.jsonl has no column, and they make no kind"),
        (["chosen", "context"], "a.jsonl has the columns chosen, context, and they make no kind"),
        (["text", "context", "continuation"], "those of two kinds of set, ppl and ctxcont"),
        (["chosen", "rejected", "prompt"], "has chosen, rejected and 'prompt', but no context, so 'prompt' would not"),
        (["choices", "answer", "question"], "rename it to context, or take it out"),
    ],
)
def test_columns_that_make_no_kind(columns: list[str], message: str) -> None:
    with pytest.raises(DataError) as caught:
        find_kind(columns, "a.jsonl")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("ppl", {"text": 3}, "has a number as text, not text"),
        ("ppl", {"text": None}, "has null as text, not text"),
        ("ctxcont", {"continuation": ["a"]}, "has a list as continuation, not text"),
        ("ctxcont", {"context": None}, "has null as context, not text"),
        ("pairs", {"chosen": {"role": "user"}}, "has an object as chosen, not text"),
        ("pairs", {"context": 1}, "has a number as context, not text"),
        ("choices", {"choices": {"text": ["a", "b"]}}, "has an object as choices, not a list of texts"),
        ("choices", {"choices": ["a"], "answer": 0}, "has 1 choices; a question takes two or more"),
        ("choices", {"choices": ["a", 2]}, "has a number among its choices; all must be texts"),
        ("choices", {"answer": 3}, "has answer 3, but its 3 choices are numbered from 0 to 2"),
        ("choices", {"answer": -1}, "has answer -1, but its 3 choices"),
        ("choices", {"answer": "C"}, "has text ('C') as answer; write the number of the right choice, 0 for the"),
        (
            "choices",
            {"answer": 1.0},
            "has a number (1.0) as answer; write the number of the right choice, 0 for the first, as an integer",
        ),
        ("choices", {"answer": True}, "has true as answer"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(
    make_set: Callable[..., TextSet], kind: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_set([ROWS[kind], ROWS[kind], ROWS[kind] | change])
    (fault,) = caught.value.faults
    assert fault.key == "val.sets"
    assert fault.message.endswith("rows.jsonl, line 3: " + fault.message.partition("line 3: ")[2])
    assert message in fault.message


def test_a_missing_column_is_named_with_its_line(make_set: Callable[..., TextSet]) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2: has no text"):
        make_set([{"text": "a"}, {"context": "a", "continuation": "b"}])


def test_the_first_fault_is_told(make_set: Callable[..., TextSet], monkeypatch: pytest.MonkeyPatch) -> None:
    """Though rows are read while those before them are tokenised."""
    monkeypatch.setattr("trainer.validation.sets.encode._BATCH_CHARS", 1)
    rows = [{"text": "a"}, {"text": "<unk>"}, {"text": 3}]
    with pytest.raises(ConfigError, match="line 2: holds text that the tokenizer turns into '<unk>'"):
        make_set(rows, family="Unigram")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "caf\xe9"}\n', "line 1 is not UTF-8: byte 0xe9"),
        (b'{"text": "a"}\n{"text": "caf\xe9"}\n', "line 2 is not UTF-8: byte 0xe9"),
        (b'{"text": "a"}\n\n{"text": "a\n', "line 3 is not JSON"),
        (b'{"text": "a"}\n{"text": "\\ud83d", "tool": 1234567890123456789}\n', "line 2"),
        (b'{"text": "a"}\n["a"]\n', "line 2 is a list; every line must be one object"),
        (b"\n\n", "holds no rows"),
        (b"", "is empty"),
    ],
)
def test_damaged_files_are_named(
    make_set: Callable[..., TextSet], tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"val.sets: .*damaged.jsonl") as caught:
        make_set(path)
    assert message in str(caught.value)


def test_half_a_character_is_refused(make_set: Callable[..., TextSet], tmp_path: Path) -> None:
    """Python's own reader of JSON, which takes long numbers, lets it through."""
    path = tmp_path / "half.jsonl"
    path.write_bytes(b'{"text": "\\ud83d", "tool": 12345678901234567890}\n')
    with pytest.raises(ConfigError, match=r"half.jsonl, line 1"):
        make_set(path)


def test_parquet_that_is_no_text_is_refused(make_set: Callable[..., TextSet], tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array([b"caf\xe9"], pa.binary())}), path)
    with pytest.raises(ConfigError, match=r"a\.parquet, row 1: has a bytes as text, not text"):
        make_set(path)
    offsets, data = pa.py_buffer(b"\0\0\0\0\4\0\0\0"), pa.py_buffer(b"caf\xe9")
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 1, [None, offsets, data])}), path)
    with pytest.raises(ConfigError, match=r"a\.parquet, rows from 1 on, cannot be read: .*utf-8"):
        make_set(path)


def test_files_of_two_kinds_are_refused(make_set: Callable[..., TextSet], tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["a"]}), folder / "1.parquet")
    pq.write_table(pa.table({"context": ["a"], "continuation": ["b"]}), folder / "2.parquet")
    with pytest.raises(ConfigError, match=r"2\.parquet has the columns context, continuation \(ctxcont\), the files"):
        make_set(folder)


def test_a_folder_of_several_splits_is_unclear(make_set: Callable[..., TextSet], tmp_path: Path) -> None:
    """Nobody wants the training split of a benchmark as its held-out set."""
    folder = tmp_path / "benchmark"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    with pytest.raises(ConfigError, match="benchmark holds train, test, and it is not clear which to take"):
        make_set(folder)
    (folder / "train.jsonl").rename(folder / "more.jsonl")
    with pytest.raises(ConfigError, match=r"benchmark holds test beside more.jsonl"):
        make_set(folder)
    (folder / "more.jsonl").unlink()
    assert make_set(folder).num_documents == 1


def test_what_is_not_there_is_named(make_set: Callable[..., TextSet], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is neither a file nor a folder"):
        make_set(tmp_path / "nowhere")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"a\.txt: only files that end with"):
        make_set(tmp_path / "a.txt")
