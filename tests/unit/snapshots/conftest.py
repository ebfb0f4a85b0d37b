"""A tiny run that leaves snapshots, in this process."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.sft import SFTConfig
from trainer.checkpoint.manifest import read_checkpoint
from trainer.checkpoint.tensor_reader import TensorReader
from trainer.run import Run, StopSignal
from trainer.snapshots import queue
from trainer.train import Trainer

ARCH = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint or snapshot."""
    reader = TensorReader(path, read_checkpoint(path)[1])
    return {
        name: reader.read(name, into=torch.empty(reader.shape(name), dtype=reader.dtype(name))) for name in reader.names
    }


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Runs in one directory."""

    folder: Path

    @property
    def run_dir(self) -> Path:
        return self.folder / "one"

    def trainer(self, **tables: Any) -> Trainer:
        """A run of 6 steps, with a checkpoint after every third and a snapshot after every second unless told
        otherwise."""
        data = {"type": "fake", "seq_len": 8, "batch_size": 2, "num_rows": 100, "num_workers": 0}
        model = {"arch": ARCH, "init": {}, "compute_dtype": "float32"}
        values = {"model": model, "data": data, "output_dir": str(self.folder), "run": {"name": "one"}, "max_steps": 6}
        values |= {"ckpt": {"interval": 3}, "eval_snapshots": {"interval": 2}}
        self.run_dir.mkdir(exist_ok=True)
        run = Run(dir=self.run_dir, attempt=0, stop=StopSignal())
        return Trainer(SFTConfig.model_validate(values | tables), run)

    def run(self, trainer: Trainer) -> None:
        try:
            trainer.run()
        finally:
            trainer.close()

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def names(self, folder: str = queue.FOLDER_NAME) -> list[str]:
        return sorted(path.name for path in (self.run_dir / folder).iterdir())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    return Bench(folder=tmp_path)


@pytest.fixture
def tensors_at() -> Callable[[Path], dict[str, Tensor]]:
    """`tensors_at(path)`: those of a checkpoint or snapshot."""
    return read_tensors
