"""examples/validation: the sets that its script writes, and the suite that names them."""

import importlib.util
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

from configs.cli import resolve
from configs.eval_worker import EvalWorkerConfig
from configs.sft import SFTConfig
from configs.validation import SuiteConfig
from trainer.tokenizer import load_tokenizer
from trainer.validation import build_validation

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "validation"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("validation_make_sets", EXAMPLE / "make_sets.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the names of their annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def world(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the repository in which the script ran."""
    world = tmp_path_factory.mktemp("world")
    (world / "examples").symlink_to(ROOT / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(world)
        patch.setattr(sys, "argv", ["make_sets.py"])
        script.main()
    return world


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_same_files_come_every_time(
    script: ModuleType, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_sets.py", "--out", str(tmp_path)])
    script.main()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["names.jsonl", "next_line.jsonl", "order.parquet", "source.jsonl"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (world / "outputs" / "validation" / name).read_bytes()


def test_rows_are_what_the_script_says(world: Path) -> None:
    folder = world / "outputs" / "validation"
    documents = [row["text"] for row in rows_of(folder / "source.jsonl")]
    assert (len(documents), sum(len(text.encode()) for text in documents)) == (12, 141_258)

    names = rows_of(folder / "names.jsonl")
    assert len(names) == 150
    for row in names:
        assert any(row["context"] + row["continuation"] in text for text in documents)
        assert row["continuation"].strip() in row["context"]

    pairs = rows_of(folder / "order.parquet")
    assert len(pairs) == 100
    for row in pairs:
        assert any(row["context"] + row["chosen"] in text for text in documents)
        assert row["rejected"] != row["chosen"]
        assert sorted(row["rejected"].split(" ")) == sorted(row["chosen"].split(" "))

    questions = rows_of(folder / "next_line.jsonl")
    assert len(questions) == 60
    assert {row["answer"] for row in questions} == {0, 1, 2, 3}
    for row in questions:
        right = row["choices"][row["answer"]]
        assert any(row["context"] + right in text for text in documents)
        assert row["choices"].count(right) == 1 and len(row["choices"]) == 4


def test_a_set_is_drawn_in_order(script: ModuleType) -> None:
    assert script.draw(list("abc"), 3, random.Random(0)) == ["a", "b", "c"]
    drawn = script.draw(list(range(100)), 10, random.Random(0))
    assert drawn == sorted(set(drawn)) and len(drawn) == 10


def test_the_suite_is_a_layer_of_sft_and_the_config_of_eval_worker(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)
    suite = "examples/validation/suite.toml"
    config = resolve(["@", "examples/quickstart/pretrain.toml", "@", suite]).config
    assert isinstance(config, SFTConfig) and config.val is not None
    (world / "run" / "configs").mkdir(parents=True)
    (world / "run" / "configs" / "sft.json").write_text(config.model_dump_json())
    worker = resolve(["@", suite, "--run-dir", "run"], EvalWorkerConfig, "eval-worker").config
    assert worker.val is not None
    assert (worker.val.sets, worker.val.seq_lens) == (config.val.sets, config.val.seq_lens)
    lengths = [config.val.seq_lens_of(entry) for entry in config.val.sets]
    assert lengths == [[128, 256], [128, 256], [256], [128, 256], [256]]


def test_text_and_its_shards_have_the_same_bits_per_byte(
    world: Path, tmp_path: Path, make_mesh: Callable[..., Any], stub_model: Callable[..., Any]
) -> None:
    """The windows are the same; the EOS of the shards' documents is no text, whatever window it falls into."""
    sets = [
        {"name": "text", "path": world / "outputs" / "validation" / "source.jsonl", "max_documents": 2},
        {"name": "shards", "path": ROOT / "examples" / "quickstart" / "heldout", "max_documents": 2},
    ]
    validation = build_validation(
        SuiteConfig.model_validate({"sets": sets, "seq_lens": [64, 128], "micro_batch_tokens": 512}),
        tokenizer=load_tokenizer(str(ROOT / "examples" / "quickstart" / "tokenizer")),
        vocab_size=4096,
        mesh=make_mesh(),
        pin_memory=False,
        cache_dir=tmp_path,
    )
    assert validation is not None
    metrics = validation.run(stub_model(vocab_size=4096))
    assert metrics is not None
    for length in (64, 128):
        assert metrics[f"val/text/bpb@{length}"] == pytest.approx(metrics[f"val/shards/bpb@{length}"], rel=1e-6)
        assert metrics[f"val/text/loss@{length}"] != pytest.approx(metrics[f"val/shards/loss@{length}"], rel=1e-6)
