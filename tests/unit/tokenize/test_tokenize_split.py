"""What is held out depends on the text alone; what is written on the inputs alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.tokenize.heldout import HeldoutRule
from trainer.tokenize.sources import SourceFile, split_tasks

TEXTS = [f"ba ko ri number {n}" for n in range(200)]
SHARE = ("--heldout.fraction", "0.2")


def test_the_rule_is_what_it_was() -> None:
    """Held-out sets of earlier work stay held out: these answers must never change."""
    rule = HeldoutRule(fraction=0.1, seed=0)
    assert [n for n in range(60) if rule.is_held_out(str(n).encode())] == [4, 19, 23, 28, 32, 34, 41, 45]
    assert sum(rule.is_held_out(str(n).encode()) for n in range(20_000)) == pytest.approx(2000, abs=130)
    other = HeldoutRule(fraction=0.1, seed=1)
    both = sum(rule.is_held_out(str(n).encode()) and other.is_held_out(str(n).encode()) for n in range(20_000))
    assert both == pytest.approx(200, abs=60)


def test_a_larger_fraction_holds_out_more_of_the_same() -> None:
    small, large = (HeldoutRule(fraction=fraction, seed=0) for fraction in (0.05, 0.5))
    held = [str(n).encode() for n in range(2000) if small.is_held_out(str(n).encode())]
    assert len(held) > 50
    assert all(large.is_held_out(text) for text in held)


def test_no_fraction_holds_nothing_out() -> None:
    assert not any(HeldoutRule(fraction=0, seed=0).is_held_out(str(n).encode()) for n in range(1000))


def test_sides_do_not_depend_on_files_order_and_formats(
    tokenize: Any, documents: Any, write_jsonl: Any, tmp_path: Path
) -> None:
    """Equal documents never lie on both sides."""
    write_jsonl(tmp_path / "one" / "a.jsonl", TEXTS)
    write_jsonl(tmp_path / "two" / "z.jsonl", TEXTS[:120][::-1] + TEXTS[:30])
    for n, text in enumerate(TEXTS[120:]):
        (tmp_path / "two" / f"{n}.txt").write_text(text)
    sides = []
    for name in ("one", "two"):
        assert tokenize(tmp_path / name, "--output-dir", tmp_path / f"{name}-out", *SHARE, "--num-tasks", "3").code == 0
        sides.append({side: set(documents(tmp_path / f"{name}-out" / side)) for side in ("train", "heldout")})
    assert sides[0] == sides[1]
    assert not sides[0]["train"] & sides[0]["heldout"]
    assert sides[0]["train"] | sides[0]["heldout"] == set(TEXTS)
    assert 20 < len(sides[0]["heldout"]) < 60


def test_shuffling_reorders_and_the_seed_decides(
    tokenize: Any, documents: Any, write_jsonl: Any, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", TEXTS[:40])
    orders = []
    for number, flags in enumerate((["--no-shuffle"], [], ["--seed", "0"], ["--seed", "1"])):
        folder = tmp_path / f"out{number}"
        assert tokenize(tmp_path / "in", "--output-dir", folder, "--heldout.fraction", "0", *flags).code == 0
        orders.append(documents(folder / "train"))
    assert orders[0] == TEXTS[:40]
    assert orders[1] == orders[2]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == sorted(TEXTS[:40]) for order in orders)


def test_the_training_side_trains_the_tokenizer(tokenize: Any, write_jsonl: Any, contents: Any, tmp_path: Path) -> None:
    """The same tokenizer with and without the held-out documents, twice; it loads in `sft` and names no path."""
    from trainer.data.shards import TokenPool
    from trainer.tokenizer import load_tokenizer

    rule = HeldoutRule(fraction=0.2, seed=0)
    train = [text for text in TEXTS if not rule.is_held_out(text.encode())]
    unseen = next(text for n in range(100) if rule.is_held_out((text := f"{'xqz ' * 200}{n}").encode()))
    write_jsonl(tmp_path / "a" / "a.jsonl", [*TEXTS, unseen])
    write_jsonl(tmp_path / "b" / "b.jsonl", train)
    for source in ("a", "b"):
        flags = ["--tokenizer.train.vocab-size", "280", *SHARE]
        answer = tokenize(tmp_path / source, "--output-dir", tmp_path / f"{source}-out", *flags)
        assert answer.code == 0, answer.err
    first, second = (contents(tmp_path / f"{source}-out" / "tokenizer") for source in "ab")
    assert first == second
    assert str(tmp_path).encode() not in b"".join(first.values())
    tokenizer = load_tokenizer(str(tmp_path / "a-out" / "tokenizer"))
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (280, 0, 1)
    pool = TokenPool([tmp_path / "a-out" / "train"])
    pool.check_tokenizer(0, "a-out")
    assert json.loads((tmp_path / "a-out" / "tokenize.json").read_text())["tokenizer"]["name"] == "a-out"


def test_the_bytes_that_train_the_tokenizer_are_bounded(tokenize: Any, write_jsonl: Any, tmp_path: Path) -> None:
    from configs.tokenize import TokenizeConfig
    from trainer.tokenize.bpe import training_texts
    from trainer.tokenize.readers import Intake, read_file
    from trainer.tokenize.sources import find_sources

    write_jsonl(tmp_path / "a.jsonl", ["a" * 10])
    write_jsonl(tmp_path / "b.jsonl", ["b" * 30] * 10)
    write_jsonl(tmp_path / "c.jsonl", ["ü" * 30] * 10)
    names = [str(tmp_path / f"{name}.jsonl") for name in "abc"]
    files, _ = find_sources(
        TokenizeConfig.model_validate({"inputs": names, "output_dir": "x", "tokenizer": {"name": "x"}})
    )
    sources = [read_file(file, Intake(text_key="text", drop_bad=False)) for file in files]
    told: list[int] = []
    texts = list(training_texts(sources, HeldoutRule(fraction=0, seed=0), 101, told.append))
    # 34 each; a has only 10, so b and c have 46 and 45.
    assert texts == ["a" * 10, "b" * 30, "b" * 16, "ü" * 22]
    assert told[-1] == 101


def test_tasks_have_about_the_same_size_in_the_order_of_files() -> None:
    sizes = [5, 100, 40, 30, 20, 10, 1]
    files = [SourceFile(path=f"{n}.txt", format="txt", size=size, mtime_ns=0) for n, size in enumerate(sizes)]
    tasks = split_tasks(files, None, 3)
    assert [[int(file.path[0]) for file in task.files] for task in tasks] == [[1], [0, 2, 5], [3, 4, 6]]
    assert len(split_tasks(files, None, None)) == 1
    assert len(split_tasks(files, None, 50)) == 7
    large = [SourceFile(path="x.txt", format="txt", size=40 * 2**20, mtime_ns=0)] * 8
    assert [len(task.files) for task in split_tasks(large, None, None)] == [2, 2, 2, 1, 1]
    empty = [SourceFile(path="x.txt", format="txt", size=0, mtime_ns=0)] * 4
    assert [len(task.files) for task in split_tasks(empty, None, 2)] == [2, 2]


def test_any_number_of_workers_writes_the_same(tokenize: Any, write_jsonl: Any, contents: Any, tmp_path: Path) -> None:
    for number in range(5):
        write_jsonl(tmp_path / "in" / f"{number}.jsonl", TEXTS[number * 40 : number * 40 + 40])
    outputs = []
    for workers in (1, 3):
        folder = tmp_path / f"out{workers}"
        flags = ["--num-tasks", "4", "--num-workers", str(workers)]
        answer = tokenize(tmp_path / "in", "--output-dir", folder, *SHARE, *flags)
        assert answer.code == 0, answer.err
        outputs.append(contents(folder))
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 2 * 4 * 3 + 1
