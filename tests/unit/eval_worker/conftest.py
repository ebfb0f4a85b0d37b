"""A tiny training that has left snapshots, and workers of it in this process."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.eval_worker import EvalWorkerConfig
from configs.launch import RUN_CONFIG
from configs.sft import SFTConfig
from trainer.attempts import write_config
from trainer.eval_worker.training import find_training, scored_config
from trainer.eval_worker.work import SnapshotScorer
from trainer.parallel.mesh import one_rank_mesh
from trainer.run import Run, StopSignal, attempt_config
from trainer.train import train

ARCH = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A run directory of its own, and what works on it."""

    run_dir: Path

    @property
    def training(self) -> SFTConfig:
        found = find_training(self.run_dir)
        assert found is not None
        return found

    def scorer(self, stop: StopSignal | None = None, **changes: Any) -> SnapshotScorer:
        """A worker on one rank.

        Args:
            changes: of the worker's config.
        """
        config = EvalWorkerConfig.model_validate({"run_dir": self.run_dir, "poll_seconds": 0.01} | changes)
        run = Run(dir=self.run_dir / "eval_worker", attempt=0, stop=stop or StopSignal())
        return SnapshotScorer(config, scored_config(config, self.training), run, one_rank_mesh(torch.device("cpu")))

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def late_steps(self) -> list[int]:
        """Steps of the worker's records, in the order they were written."""
        return [record["step"] for record in self.records() if "time/eval" in record]

    def snapshots(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "eval_snapshots").iterdir())


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path, tiny_heldout: Path) -> Path:
    """The directory of a run of 6 steps, with a validation of its own and a snapshot after every second."""
    folder = tmp_path_factory.mktemp("trained")
    values: dict[str, Any] = {
        "model": {"arch": ARCH, "init": {"std": 0.1}, "compute_dtype": "float32"},
        "tokenizer": {"name": str(tiny_tokenizer)},
        "data": {"type": "fake", "seq_len": 32, "batch_size": 2, "num_rows": 100, "num_workers": 0},
        "optim": {"lr": 1e-2},
        "output_dir": str(folder),
        "run": {"name": "one"},
        "max_steps": 6,
        "eval_snapshots": {"interval": 2},
        "val": {"interval": 2, "sets": [{"name": "held", "path": str(tiny_heldout)}], "seq_lens": [32]},
    }
    config = SFTConfig.model_validate(values)
    run_dir = folder / "one"
    for path in (attempt_config(run_dir, 0), run_dir / RUN_CONFIG):
        write_config(config, path)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        train(config, Run(dir=run_dir, attempt=0, stop=StopSignal()))
    return run_dir


@pytest.fixture
def bench(trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Bench:
    caplog.set_level("INFO", "trainer")
    run_dir = tmp_path / "one"
    shutil.copytree(trained, run_dir)
    return Bench(run_dir=run_dir)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """`messages(part)`: what was logged that has this text in it."""
    return lambda part: [text for record in caplog.records if part in (text := record.getMessage())]
