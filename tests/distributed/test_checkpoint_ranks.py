"""Checkpoints of one rank load on two and the other way round; two ranks fail together."""

import subprocess
import sys
from pathlib import Path

import torch

from configs.checkpoint import CheckpointConfig
from trainer.checkpoint import Checkpointer, find_checkpoint
from trainer.parallel.mesh import Mesh

WORKER = Path(__file__).with_name("checkpoint_ranks_worker.py")
SHAPES = {"even": (4, 3), "uneven": (5, 3), "one_row": (1, 3), "vector": (3,)}


def _tensors(value: float) -> dict[str, torch.Tensor]:
    shapes = {f"model.{name}": torch.Size(shape) for name, shape in SHAPES.items()}
    numbers = {name: torch.arange(shape.numel(), dtype=torch.float32).reshape(shape) for name, shape in shapes.items()}
    return {name: tensor + 100 * value for name, tensor in numbers.items()} | {
        "optimizer.step.even": torch.tensor(value)
    }


def test_ranks(tmp_path: Path) -> None:
    """One rank, then two, then one: the same tensors; the checks on two ranks are in the worker."""
    one_rank = Mesh(
        device=torch.device("cpu"), rank=0, world_size=1, dp_rank=0, dp_size=1, device_mesh=None, host_group=None
    )
    saver = Checkpointer(tmp_path / "one", CheckpointConfig(async_save=False), one_rank)
    saver.save(1, _tensors(1.0), {})

    command = [sys.executable, str(WORKER), str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
        assert output.endswith("all checks passed\n")

    loaded = _tensors(-1.0)
    saver.load(find_checkpoint(tmp_path / "two", 7, print), loaded)
    for name, tensor in _tensors(1.0).items():
        assert torch.equal(loaded[name], tensor), name
