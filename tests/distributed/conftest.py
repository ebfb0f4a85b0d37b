"""Runs through the real command, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.checkpoint import Checkpointer
from trainer.checkpoint.safe_reader import read_metadata
from trainer.parallel.mesh import one_rank_mesh

COMMAND = [str(Path(sys.executable).with_name("sft"))]

START = """
max_steps = {steps}
output_dir = "{output_dir}"

[run]
name = "{name}"

[tokenizer]
name = "{tokenizer}"

[model]
compute_dtype = "float32"
init = {{ std = 0.1, seed = 5 }}

[model.arch]
model_type = "qwen3"
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
max_position_embeddings = 256
tie_word_embeddings = true

[data]
type = "tokens"
paths = ["{shards}"]
seq_len = 48
batch_size = 8
micro_batch_size = 2
seed = 7

[optim]
lr = 1e-2

[scheduler]
type = "linear"
warmup_steps = 3
decay_steps = 0.5
min_lr = 1e-3

[log]
checksum_interval = 5

[ckpt]
interval = {interval}

[val]
interval = {interval}
sets = [{{ name = "held", path = "{heldout}" }}]
seq_lens = [32, 64]
micro_batch_tokens = 256
"""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A run that has ended."""

    dir: Path
    config: Path
    returncode: int
    output: str

    @property
    def metrics(self) -> dict[int, dict]:
        """Metrics by step; the last line of a step counts."""
        records: dict[int, dict] = {}
        for line in (self.dir / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            records.setdefault(record["step"], {}).update(record)
        return records

    def column(self, name: str) -> list:
        """Values of one metric over the steps, step 0 left out."""
        return [record[name] for step, record in sorted(self.metrics.items()) if step and name in record]

    def tensors(self, step: int) -> dict[str, Tensor]:
        """All tensors of a checkpoint."""
        return load_tensors(self.dir / "checkpoints" / f"step_{step}")


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, on one rank."""
    entries = read_metadata(path).state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    mesh = one_rank_mesh(torch.device("cpu"))
    Checkpointer(path.parents[1], None, mesh).load(path, tensors)
    return tensors


@pytest.fixture(scope="session")
def stored_tensors() -> Callable[[Path], dict[str, Tensor]]:
    """Every tensor of the checkpoint at a path, on one rank."""
    return load_tensors


class Runner:
    """Writes start configs on the tiny shards and runs the command."""

    def __init__(self, folder: Path, tokenizer: Path, shards: Path, heldout: Path) -> None:
        self.folder = folder
        self._paths = {"tokenizer": tokenizer, "shards": shards, "heldout": heldout, "output_dir": folder}

    def config(self, name: str, *, steps: int = 20, interval: int = 10) -> Path:
        """A start.toml of its own for run `name`."""
        path = self.folder / f"{name}.toml"
        path.write_text(START.format(name=name, steps=steps, interval=interval, **self._paths))
        return path

    def popen(self, *arguments: str | Path) -> subprocess.Popen:
        """Start the command; its output goes to a pipe, and it leads a process group of its own."""
        return subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def run(self, config: Path, *arguments: str | Path, ranks: int = 1, check: bool = True) -> Done:
        """Run the command to its end."""
        process = self.popen("@", config, "--deployment.num-train-gpus", str(ranks), *arguments)
        try:
            output, _ = process.communicate(timeout=300)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if check:
            assert process.returncode == 0, output
        return Done(dir=self.folder / config.stem, config=config, returncode=process.returncode, output=output)


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path, tiny_shards: Path, tiny_heldout: Path):
    return Runner(tmp_path_factory.mktemp("runs"), tiny_tokenizer, tiny_shards, tiny_heldout)


@pytest.fixture(scope="session")
def reference(runner: Runner) -> Done:
    """20 steps on one rank, rows filled by threads, checkpoints and validation at 10 and 20."""
    return runner.run(runner.config("reference"))
