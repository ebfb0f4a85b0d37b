"""The shipped quickstart data is what its README says, and whole."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from configs.cli import resolve
from configs.tokenize import TokenizeConfig
from trainer.data.shards import TokenPool
from trainer.tokenize.command import run_tokenize
from trainer.tokenize.heldout import HeldoutRule
from trainer.tokenizer import load_tokenizer
from trainer.validation.token_bytes import token_bytes

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"


@pytest.fixture(scope="module")
def bigram(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("bigram")


def test_shards_belong_to_the_tokenizer_and_hold_whole_documents() -> None:
    tokenizer = load_tokenizer(str(QUICKSTART / "tokenizer"))
    assert (len(tokenizer), tokenizer.eos_token_id) == (4096, 0)
    for name, num_tokens, num_documents in (("train", 2_034_805, 388), ("heldout", 37_781, 12)):
        pool = TokenPool([QUICKSTART / name])
        pool.check_tokenizer(0, "quickstart")
        assert (pool.num_tokens, pool.num_documents) == (num_tokens, num_documents)
        ids = pool.read(0, num_tokens)
        assert (np.flatnonzero(ids == 0) + 1).tolist() == pool.document_ends(0, num_tokens).tolist()
        assert ids.max() < 4096


def test_tokens_count_the_bytes_of_the_text(bigram: ModuleType) -> None:
    counts = token_bytes(load_tokenizer(str(QUICKSTART / "tokenizer")), 4096)
    pool = TokenPool([QUICKSTART / "heldout"])
    text_bytes = sum(map(len, bigram.read_documents(QUICKSTART / "heldout")))
    assert counts[pool.read(0, pool.num_tokens)].sum() == text_bytes == 141_258


def test_no_held_out_document_stands_in_the_training_text(bigram: ModuleType) -> None:
    train = bigram.read_documents(QUICKSTART / "train")
    train_lines = {line.strip() for text in train for line in text.splitlines() if len(line.strip()) > 20}
    for text in bigram.read_documents(QUICKSTART / "heldout"):
        lines = {line.strip() for line in text.splitlines() if len(line.strip()) > 20}
        assert len(lines & train_lines) <= len(lines) / 2


def test_the_bar_is_the_number_in_the_readme(bigram: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bigram.main()
    assert capsys.readouterr().out == "byte bigram: 3.4939 bits per byte over 141246 held-out bytes\n"
    assert "**3.4939 bits\nper byte**" in (QUICKSTART / "README.md").read_text()


def test_the_bigram_formula_by_hand(bigram: ModuleType) -> None:
    counts = bigram.count_pairs([b"aab", b"b"])
    assert counts.sum() == 2
    assert (counts[97, 97], counts[97, 98]) == (1, 1)


def test_files_are_small_and_name_no_machine() -> None:
    files = [path for path in QUICKSTART.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 5_000_000
    for path in files:
        if path.suffix in {".json", ".metadata", ".md", ".toml"}:
            text = path.read_text()
            assert not [root for root in ("/root/", "/home/", "/tmp/", "/usr/") if root in text], path
    assert [path.read_text().split("|")[0] for path in sorted(QUICKSTART.rglob("*.metadata"))] == ["quickstart"] * 2


def test_the_record_says_what_is_there_and_how_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads((QUICKSTART / "tokenize.json").read_text())
    files = [path for name in ("tokenizer", "train", "heldout") for path in (QUICKSTART / name).iterdir()]
    assert sorted(record["files"]) == sorted(str(path.relative_to(QUICKSTART)) for path in files)
    assert record["train"] == {"documents": 388, "tokens": 2_034_805, "bytes": 7_407_411}
    assert record["heldout"] == {"documents": 12, "tokens": 37_781, "bytes": 141_258}
    monkeypatch.chdir(QUICKSTART.parents[1])
    config = resolve(["@", "examples/quickstart/tokenize.toml"], TokenizeConfig, "tokenize").config
    assert record["settings"] == config.model_dump(mode="json", exclude={"num_workers", "clean", "output_dir"})


def test_documents_lie_on_their_side_by_their_text(bigram: ModuleType) -> None:
    rule = HeldoutRule(fraction=0.03, seed=3)
    assert not any(rule.is_held_out(text) for text in bigram.read_documents(QUICKSTART / "train"))
    assert all(rule.is_held_out(text) for text in bigram.read_documents(QUICKSTART / "heldout"))


def test_near_duplicates_go(load_script: Callable[[str], ModuleType]) -> None:
    corpus = load_script("corpus")
    lines = [f"a line that is long enough, number {n}\n" for n in range(10)]
    documents = {"part": "".join(lines[:4]), "whole": "".join(lines), "other": "".join(lines[:2]) + "x" * 30 + "\n" * 2}
    assert list(corpus.drop_near_duplicates(documents)) == ["whole"]
    documents["other"] = "".join(lines[:1]) + "another line that is long enough\n"
    assert list(corpus.drop_near_duplicates(documents)) == ["whole", "other"]


@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="the shipped data are of CPython 3.11.7's library")
def test_the_two_commands_give_the_same_files_again(
    load_script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["corpus.py"])
    load_script("corpus").main()
    record = json.loads((QUICKSTART / "tokenize.json").read_text())
    texts = [json.loads(line)["text"] for line in Path("outputs/stdlib.jsonl").read_text().splitlines()]
    if sum(len(text.encode()) for text in texts) != record["train"]["bytes"] + record["heldout"]["bytes"]:
        pytest.skip("this build of CPython 3.11.7 has another library")
    assert run_tokenize(["@", str(QUICKSTART / "tokenize.toml"), "--output-dir", "outputs/quickstart"]) == 0
    for path in sorted(Path("outputs/quickstart").rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (QUICKSTART / path.relative_to("outputs/quickstart")).read_bytes(), path
