"""Inputs, tokenizers and folders that cannot be used: one message that names them, no traceback, nothing half done."""

import errno
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

GOOD = b'{"text": "ba ko"}\n'
WHOLE = ("--heldout.fraction", "0")


def parquet(columns: dict[str, list[Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


BAD_ROWS = {
    "broken line": ("a.jsonl", GOOD + b'{"text": "ba\n' + GOOD, "a.jsonl, line 2 is not JSON: "),
    "cut line": ("a.jsonl", GOOD + b'{"text": "ba', "a.jsonl, line 2 is not JSON: "),
    "no object": ("a.jsonl", GOOD + b'["text"]\n', "a.jsonl, line 2 is a JSON list, not an object"),
    "no key": ("a.jsonl", GOOD + b'\n{"body": "x"}\n', "a.jsonl, line 3 has no 'text'; its keys are 'body' (text_key"),
    "null": ("a.jsonl", GOOD + b'{"text": null}\n', "a.jsonl, line 2 has NoneType at 'text', not text"),
    "a number": ("a.jsonl", GOOD + b'{"text": 3}\n', "a.jsonl, line 2 has int at 'text', not text"),
    "latin-1": ("a.jsonl", GOOD + b'{"text": "gr\xfc"}\n', "a.jsonl, line 2 is not JSON: "),
    "half a surrogate": ("a.jsonl", GOOD + b'{"text": "\\ud83d"}\n', "a.jsonl, line 2 is not JSON: "),
    "gz line": ("a.jsonl.gz", gzip.compress(GOOD + b"{}\n"), "a.jsonl.gz, line 2 has no 'text'; its keys are none"),
    "parquet null": ("a.parquet", parquet({"text": ["", "ba", None]}), "a.parquet, row 3 has NoneType at 'text'"),
    "parquet number": ("a.parquet", parquet({"text": [1, 2]}), "a.parquet, row 1 has int at 'text', not text"),
    "latin-1 file": ("a.txt", b"gr\xfc\xdf", "a.txt is not UTF-8: byte 0xfc at offset 2"),
}
DAMAGED = {
    "cut gz": ("a.jsonl.gz", gzip.compress(GOOD * 1000)[:-20], "a.jsonl.gz cannot be read: "),
    "no gz": ("a.jsonl.gz", GOOD, "a.jsonl.gz cannot be read: Not a gzipped file"),
    "no parquet": ("a.parquet", GOOD, "a.parquet cannot be read: "),
    "empty parquet": ("a.parquet", b"", "a.parquet cannot be read: "),
    "cut parquet": ("a.parquet", parquet({"text": ["ba"]})[:-30], "a.parquet cannot be read: "),
    "other column": ("a.parquet", parquet({"body": ["ba"]}), "a.parquet has no column 'text'; its columns are 'body'"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_ends_the_work_or_is_counted(tokenize: Any, tmp_path: Path, case: str) -> None:
    name, content, message = BAD_ROWS[case]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    (tmp_path / "in" / "good.jsonl").write_bytes(GOOD)
    base = [tmp_path / "in", "--output-dir", tmp_path / "out", *WHOLE]
    answer = tokenize(*base)
    assert answer.code == 1
    assert f"{tmp_path / 'in'}/{message}" in answer.err and len(answer.err.splitlines()) == 1
    assert 'bad_documents = "drop" leaves such documents out' in answer.err
    answer = tokenize(*base, "--bad-documents", "drop")
    assert answer.code == 0, answer.err
    dropped = 2 if case == "parquet number" else 1
    assert f"dropped {dropped} rows without text at 'text' or that could not be read" in answer.out
    assert json.loads((tmp_path / "out" / "tokenize.json").read_text())["bad"] == dropped


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_ends_the_work(tokenize: Any, tmp_path: Path, case: str) -> None:
    name, content, message = DAMAGED[case]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    for flags in ([], ["--bad-documents", "drop"]):
        answer = tokenize(tmp_path / "in", "--output-dir", tmp_path / "out", *WHOLE, *flags)
        assert answer.code == 1
        assert f"{tmp_path / 'in'}/{message}" in answer.err and len(answer.err.splitlines()) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".partial"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.txt"])
def test_flipped_bytes_give_a_message_or_documents(tokenize: Any, tmp_path: Path, name: str) -> None:
    texts = [f"ba ko {n}" for n in range(40)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    whole = {"a.jsonl": lines, "a.jsonl.gz": gzip.compress(lines), "a.parquet": parquet({"text": texts})}
    content = whole.get(name, "\n".join(texts).encode())
    generator = np.random.default_rng(0)
    codes = []
    for _ in range(12):
        damaged = bytearray(content)
        for place in generator.integers(0, len(content), 3):
            damaged[place] ^= 1 << generator.integers(0, 8)
        (tmp_path / name).write_bytes(damaged)
        answer = tokenize(tmp_path / name, "--output-dir", tmp_path / "out", "--clean", *WHOLE)
        assert answer.code in (0, 1)
        if answer.code:
            assert str(tmp_path / name) in answer.err and "Traceback" not in answer.err
        codes.append(answer.code)
    assert 1 in codes


def test_inputs_that_cannot_be(tokenize: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "a.csv").write_text("text\nba\n")
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "a.jsonl").symlink_to(tmp_path / "gone")
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl.zst").write_bytes(GOOD)
    os.mkfifo(tmp_path / "pipe")
    cases = [
        ([tmp_path / "empty"], f"inputs (flag --inputs): the folder {tmp_path / 'empty'} holds no file that ends with"),
        ([tmp_path / "others"], "it holds others, a.csv for one"),
        (
            [tmp_path / "others" / "a.csv"],
            "a.csv: only files that end with .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .t",
        ),
        ([tmp_path / "gone.jsonl"], f"{tmp_path / 'gone.jsonl'} does not exist"),
        (["gone.jsonl"], "gone.jsonl does not exist"),
        ([""], "inputs (flag --inputs): one of them is empty"),
        ([tmp_path / "pipe"], f"{tmp_path / 'pipe'} is neither a file nor a folder"),
        ([tmp_path / "dangling"], f"{tmp_path / 'dangling' / 'a.jsonl'} cannot be read (No such file or directory)"),
        ([tmp_path / "a.jsonl"] * 2, f"{tmp_path / 'a.jsonl'} is given twice; "),
        ([tmp_path / "a.jsonl", tmp_path / "link.jsonl"], f"link.jsonl is given twice (as {tmp_path / 'a.jsonl'})"),
        (["org/set", tmp_path / "a.jsonl"], "a Hugging Face dataset must be the only input"),
        ([tmp_path / "a.jsonl.zst"], "the package zstandard is needed to read .zst and is not installed"),
        ([], "inputs: is missing"),
    ]
    for inputs, message in cases:
        if "zstandard" in message and "zstd" in __import__("fsspec.compression").compression.compr:
            continue
        answer = tokenize(*inputs, "--output-dir", tmp_path / "out")
        assert answer.code == 2
        assert message in answer.err
        assert not (tmp_path / "out").exists()


def test_a_dataset_that_cannot_be_reached(tokenize: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach 'org/set' on the Hub (OfflineModeIsEnabled)\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    answer = tokenize("org/set", "--output-dir", tmp_path / "out")
    assert answer.code == 2
    assert answer.err == (
        "inputs (flag --inputs): there is no file or folder org/set, and as a Hugging Face dataset it cannot be "
        "loaded: ConnectionError: Couldn't reach 'org/set' on the Hub (OfflineModeIsEnabled)\n"
    )


def test_a_dataset_in_more_tasks_than_shards(tokenize: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    stub = datasets.Dataset.from_dict({"text": ["ba"] * 9}).to_iterable_dataset(num_shards=3)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stub)
    answer = tokenize("org/set", "--output-dir", tmp_path / "out", "--num-tasks", "4")
    assert answer.code == 2 and "has 3 shards and cannot be split into 4 tasks" in answer.err


def test_output_folders_that_cannot_be(tokenize: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "file").write_text("")
    answer = tokenize(tmp_path / "a.jsonl", "--output-dir", tmp_path / "file" / "out")
    assert answer.code == 2
    assert answer.err.startswith(f"output_dir (flag --output-dir): {tmp_path / 'file'}")
    assert answer.err.endswith("cannot be written (Not a directory)\n")


def test_no_training_data_is_an_error(tokenize: Any, tmp_path: Path) -> None:
    """Field case R52: documents without text are dropped and counted; none left is an error."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": ""}\n' * 3)
    answer = tokenize(tmp_path / "a.jsonl", "--output-dir", tmp_path / "out")
    assert answer.code == 1
    assert answer.err == "no training data: there is no document (3 without text, 0 bad rows were dropped)\n"
    answer = tokenize(
        tmp_path / "a.jsonl", "--output-dir", tmp_path / "out", "--tokenizer.train.vocab-size", "300", "--clean"
    )
    assert answer.code == 1 and answer.err.startswith("there is no text to train a tokenizer on")
    assert not (tmp_path / "out" / "train").exists()


def test_a_full_disk_is_named_with_the_file(tokenize: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.jsonl").write_bytes(GOOD)
    for method, name in (("write", "00000_unshuffled.ds"), ("copy", "00000_00000_doc_shuffled.ds")):
        with monkeypatch.context() as patch:
            patch.setattr(TokenizedFile, method, write if method == "write" else lambda *_, **__: write())
            answer = tokenize(tmp_path / "a.jsonl", "--output-dir", tmp_path / "out", *WHOLE)
        file = tmp_path / "out" / ".partial" / "train" / name
        assert (answer.code, answer.err) == (1, f"{file} cannot be written: No space left on device\n")
    assert tokenize(tmp_path / "a.jsonl", "--output-dir", tmp_path / "out", *WHOLE).code == 0


def test_a_fault_in_a_worker_process_is_one_message(tokenize: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.jsonl").write_bytes(GOOD + b'{"text": 1}\n' * (number == 1))
    flags = ["--num-tasks", "3", "--num-workers", "2"]
    answer = tokenize(tmp_path / "in", "--output-dir", tmp_path / "out", *flags)
    assert answer.code == 1
    assert answer.err.startswith(f"{tmp_path / 'in' / '1.jsonl'}, line 2 has int at 'text', not text")
    assert len(answer.err.splitlines()) == 1
