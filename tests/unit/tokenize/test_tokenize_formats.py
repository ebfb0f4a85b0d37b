"""Every kind of input gives the same documents, in datatrove's own format."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

TEXTS = ["ba ko ri", "tu sel\nmon", "ar ith", "", "größe 中文 \U0001f600", "po len da wis"]
KEPT = sorted(text for text in TEXTS if text)
WHOLE = ("--heldout.fraction", "0")


def as_jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "media": 3}) + "\n" for text in texts).encode()


def write(folder: Path, kind: str, texts: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    match kind:
        case "jsonl":
            (folder / "a.jsonl").write_bytes(as_jsonl(texts[:3]) + b"\n  \n" + as_jsonl(texts[3:])[:-1])
        case "jsonl.gz":
            (folder / "b.jsonl.gz").write_bytes(gzip.compress(as_jsonl(texts[:3])) + gzip.compress(as_jsonl(texts[3:])))
        case "parquet":
            table = pa.table({"n": list(range(len(texts))), "text": texts, "metadata": ["x"] * len(texts)})
            pq.write_table(table, folder / "c.parquet", row_group_size=2)
        case "txt":
            for number, text in enumerate(texts):
                (folder / f"{number}.txt").write_text(text, newline="")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "txt"])
def test_a_format(tokenize: Any, documents: Any, tmp_path: Path, kind: str) -> None:
    write(tmp_path / "in", kind, TEXTS)
    answer = tokenize(tmp_path / "in", "--output-dir", tmp_path / "out", *WHOLE)
    assert answer.code == 0, answer.err
    assert sorted(documents(tmp_path / "out" / "train")) == KEPT
    assert "dropped 1 documents without text" in answer.out
    num_bytes = sum(len(text.encode()) for text in KEPT)
    assert "train: 5 documents, " in answer.out and f"{num_bytes} bytes" in answer.out
    assert not (tmp_path / "out" / "heldout").exists()
    assert not (tmp_path / "out" / ".partial").exists()


def test_a_mixed_tree_is_read_sorted_without_hidden_and_other_files(
    tokenize: Any, documents: Any, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    write(source / "sub" / "deep", "jsonl", ["one"])
    write(source, "jsonl.gz", ["two"])
    write(source / "a", "parquet", ["three"])
    write(source / ".hidden", "txt", ["never"])
    (source / "README.md").write_text("never")
    (source / ".secret.txt").write_text("never")
    (source / "Z.TXT").write_text("four")
    answer = tokenize(source, "--output-dir", tmp_path / "out", "--no-shuffle", "--num-tasks", "1", *WHOLE)
    assert answer.code == 0, answer.err
    assert documents(tmp_path / "out" / "train") == ["four", "three", "two", "one"]


def test_files_come_in_the_order_given(tokenize: Any, documents: Any, tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(name)
    files = [tmp_path / "b.txt", tmp_path / "a.txt"]
    assert tokenize(*files, "--output-dir", tmp_path / "out", "--no-shuffle", "--num-tasks", "1", *WHOLE).code == 0
    assert documents(tmp_path / "out" / "train") == ["b", "a"]


def test_another_text_key(tokenize: Any, documents: Any, write_jsonl: Any, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["ba ko"], key="content")
    pq.write_table(pa.table({"content": ["ri tu"], "text": ["no"]}), tmp_path / "b.parquet")
    files = [file, tmp_path / "b.parquet"]
    assert tokenize(*files, "--output-dir", tmp_path / "out", "--text-key", "content", *WHOLE).code == 0
    assert sorted(documents(tmp_path / "out" / "train")) == ["ba ko", "ri tu"]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_hub_dataset(
    tokenize: Any, documents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(path: str, **options: Any) -> Any:
        asked.append((path, options))
        dataset = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
        return dataset.to_iterable_dataset(num_shards=3) if options["streaming"] else dataset

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    flags = ["--subset", "en", "--split", "test", "--num-tasks", "2", *WHOLE] + (
        [] if streaming else ["--no-streaming"]
    )
    answer = tokenize("org/set", "--output-dir", tmp_path / "out", *flags)
    assert answer.code == 0, answer.err
    assert sorted(documents(tmp_path / "out" / "train")) == KEPT
    assert asked[0] == ("org/set", {"name": "en", "split": "test", "streaming": streaming})
    assert len(list((tmp_path / "out" / "train").glob("*.ds"))) == 2


def test_a_hub_dataset_trains_a_tokenizer(tokenize: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": ["ba ko ri tu"] * 9})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: dataset.to_iterable_dataset())
    answer = tokenize("set", "--output-dir", tmp_path / "out", "--tokenizer.train.vocab-size", "262", *WHOLE)
    assert answer.code == 0, answer.err
    assert "train: 9 documents" in answer.out
    assert (tmp_path / "out" / "tokenizer" / "tokenizer.json").is_file()


def test_names_with_odd_characters(tokenize: Any, documents: Any, tmp_path: Path) -> None:
    source = tmp_path / "we ird::[x]*" / "file:"
    source.mkdir(parents=True)
    (source / "~a b?#.txt").write_text("ba ko")
    target = tmp_path / "o::ut [y]*"
    answer = tokenize(tmp_path / "we ird::[x]*", "--output-dir", target, *WHOLE)
    assert answer.code == 0, answer.err
    assert documents(target / "train") == ["ba ko"]


def test_without_shuffling_the_files_are_datatroves(
    tokenize: Any, write_jsonl: Any, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """Byte for byte what its JsonlReader and DocumentTokenizer write, but for the name in the metadata."""
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    texts = [f"ba ko ri {n} " * (n % 7 + 1) for n in range(50)]
    write_jsonl(tmp_path / "in" / "a.jsonl", texts)
    theirs = DocumentTokenizer(
        str(tmp_path / "theirs"),
        str(tiny_tokenizer / "tokenizer.json"),
        eos_token="<|endoftext|>",
        shuffle_documents=False,
    )
    theirs.run(JsonlReader(str(tmp_path / "in")).run())
    assert tokenize(tmp_path / "in", "--output-dir", tmp_path / "out", "--no-shuffle", *WHOLE).code == 0
    for suffix in ("", ".index"):
        name = f"00000_unshuffled.ds{suffix}"
        assert (tmp_path / "out" / "train" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    metadata = "00000_unshuffled.ds.metadata"
    ours, other = ((tmp_path / f / metadata).read_text().splitlines() for f in ("out/train", "theirs"))
    assert (ours[0], ours[1:]) == ("tiny|2", other[1:])


def test_datatrove_reads_what_we_write(
    tokenize: Any, write_jsonl: Any, documents: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    """Field case R48: the two formats are one, in both directions; the other one is in test_shards.py (tiny_shards)."""
    from datatrove.utils.dataset import DatatroveFileDataset, DatatroveFolderDataset

    for number in range(3):
        write_jsonl(tmp_path / "in" / f"{number}.jsonl", [f"ba ko ri {number} {n}" for n in range(20)])
    assert tokenize(tmp_path / "in", "--output-dir", tmp_path / "out", "--num-tasks", "3", *WHOLE).code == 0
    folder = tmp_path / "out" / "train"
    assert [path.name for path in sorted(folder.glob("*.ds"))] == [f"0000{n}_00000_doc_shuffled.ds" for n in range(3)]
    theirs = DatatroveFolderDataset(str(folder), seq_len=15, token_size=2)
    tokens = [np.fromfile(path, "<u2") for path in sorted(folder.glob("*.ds"))]
    assert len(theirs) == sum(len(part) // 16 for part in tokens)
    assert theirs[0]["input_ids"].tolist() == tokens[0][:16].tolist()
    one = DatatroveFileDataset(str(folder / "00001_00000_doc_shuffled.ds"), 15, token_size=2, return_positions=True)
    ends = np.fromfile(folder / "00001_00000_doc_shuffled.ds.index", "<u8")
    assert one[0]["positions"][: int(ends[0])].tolist() == list(range(int(ends[0])))
    assert sorted(documents(folder)) == sorted(f"ba ko ri {number} {n}" for number in range(3) for n in range(20))
