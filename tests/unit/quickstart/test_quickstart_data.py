"""The shipped quickstart data is what its README says, and whole."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from trainer.data.shards import TokenPool
from trainer.tokenizer import load_tokenizer
from trainer.validation.token_bytes import token_bytes

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", QUICKSTART / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bigram() -> ModuleType:
    return load_script("bigram")


def test_shards_belong_to_the_tokenizer_and_hold_whole_documents() -> None:
    tokenizer = load_tokenizer(str(QUICKSTART / "tokenizer"))
    assert (len(tokenizer), tokenizer.eos_token_id) == (4096, 0)
    for name, num_tokens, num_documents in (("train", 2_031_716, 387), ("heldout", 40_781, 13)):
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
    assert counts[pool.read(0, pool.num_tokens)].sum() == text_bytes == 150_509


def test_no_held_out_document_stands_in_the_training_text(bigram: ModuleType) -> None:
    train = bigram.read_documents(QUICKSTART / "train")
    train_lines = {line.strip() for text in train for line in text.splitlines() if len(line.strip()) > 20}
    for text in bigram.read_documents(QUICKSTART / "heldout"):
        lines = {line.strip() for line in text.splitlines() if len(line.strip()) > 20}
        assert len(lines & train_lines) <= len(lines) / 2


def test_the_bar_is_the_number_in_the_readme(bigram: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bigram.main()
    assert capsys.readouterr().out == "byte bigram: 3.5104 bits per byte over 150496 held-out bytes\n"
    assert "**3.5104 bits\nper byte**" in (QUICKSTART / "README.md").read_text()


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


def test_the_split_depends_on_the_path_alone_and_near_duplicates_go() -> None:
    make_shards = load_script("make_shards")
    assert make_shards.is_held_out("sched.py")
    assert not make_shards.is_held_out("argparse.py")
    held_out = sum(make_shards.is_held_out(f"{n}.py") for n in range(10_000))
    assert 350 < held_out < 450
    lines = [f"a line that is long enough, number {n}\n" for n in range(10)]
    documents = {"part": "".join(lines[:4]), "whole": "".join(lines), "other": "".join(lines[:2]) + "x" * 30 + "\n" * 2}
    assert list(make_shards.drop_near_duplicates(documents)) == ["whole"]
    documents["other"] = "".join(lines[:1]) + "another line that is long enough\n"
    assert list(make_shards.drop_near_duplicates(documents)) == ["whole", "other"]
