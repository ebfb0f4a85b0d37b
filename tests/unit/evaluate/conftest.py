"""A tiny run in this process, and the scoring of what it leaves."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.sft import SFTConfig
from trainer.evaluate import evaluate
from trainer.run import Run, StopSignal
from trainer.train import Trainer

ARCH = {
    "model_type": "qwen3",
    "vocab_size": 384,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
TEXTS = ["kori ba", "selmon arith, po len dawis. ", "tu", "baba korisel monith arpo lenda wistu ba ko ri tu sel"]
PAIRS = [
    {"context": "kori ", "chosen": "ba", "rejected": "wistu"},
    {"context": "ba ", "chosen": "sel mon", "rejected": "ar"},
]


@dataclass
class Bench:
    """Runs in one folder, with checkpoints and a round of validation at steps 2 and 4."""

    folder: Path
    tokenizer: Path
    arch = ARCH

    def config(self, name: str, **tables: Any) -> SFTConfig:
        """Of a training run; tables are merged one level deep, those with a `type` replace, None leaves one out."""
        base = {
            "model": {"arch": ARCH, "init": {"std": 0.1}, "compute_dtype": "float32"},
            "tokenizer": {"name": str(self.tokenizer)},
            "data": {"type": "fake", "seq_len": 64, "batch_size": 2, "num_rows": 50, "num_workers": 0},
            "val": self.val | {"interval": 2},
            "optim": {"lr": 0.05},
            "ckpt": {"interval": 2, "async_save": False},
            "output_dir": str(self.folder),
            "run": {"name": name},
            "max_steps": 4,
        }
        merged = {**base}
        for key, table in tables.items():
            below = base.get(key)
            merges = isinstance(table, dict) and isinstance(below, dict) and "type" not in table
            merged[key] = below | table if merges else table
        return SFTConfig.model_validate({key: table for key, table in merged.items() if table is not None})

    @property
    def val(self) -> dict[str, Any]:
        sets = [{"name": name, "path": str(self.folder / f"{name}.jsonl")} for name in ("texts", "pairs")]
        return {"sets": sets, "seq_lens": [8, 32], "micro_batch_tokens": 64}

    def run(self, config: SFTConfig) -> Run:
        run_dir = config.output_dir / str(config.run.name)
        run_dir.mkdir(exist_ok=True)
        return Run(dir=run_dir, attempt=0, stop=StopSignal())

    def train(self, name: str, **tables: Any) -> Path:
        config = self.config(name, **tables)
        trainer = Trainer(config, run := self.run(config))
        try:
            trainer.run()
        finally:
            trainer.close()
        return run.dir

    def score(self, name: str, **tables: Any) -> list[dict[str, Any]]:
        """The records that the scoring adds."""
        config = self.config(name, max_steps=0, **tables)
        run = self.run(config)
        before = self.records(run.dir)
        evaluate(config, run)
        after = self.records(run.dir)
        assert after[: len(before)] == before
        return after[len(before) :]

    @staticmethod
    def records(run_dir: Path) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl."""
        path = run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @staticmethod
    def scores(record: dict[str, Any]) -> dict[str, float]:
        """The held-out metrics of a record."""
        return {name: value for name, value in record.items() if name.startswith("val/")}

    @staticmethod
    def contents(folder: Path) -> dict[str, bytes]:
        """Every file below a folder."""
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_sets(folder: Path) -> None:
    for name, rows in (("texts", [{"text": text} for text in TEXTS]), ("pairs", PAIRS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(autouse=True, scope="module")
def _one_rank() -> Iterator[None]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Bench:
    folder = tmp_path_factory.mktemp("evaluate")
    write_sets(folder)
    return Bench(folder=folder, tokenizer=tiny_tokenizer)


@pytest.fixture(scope="module")
def trained(bench: Bench) -> Path:
    """The directory of a run that was trained and is done; not to be changed."""
    return bench.train("trained")


@pytest.fixture
def own(bench: Bench, trained: Path) -> Iterator[Path]:
    """A copy of it, the run "own"."""
    yield Path(shutil.copytree(trained, bench.folder / "own"))
    shutil.rmtree(bench.folder / "own")
