"""What the checkpoint tests share: one rank without a process group, and tensors that say which step they are of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.checkpoint import CheckpointConfig
from trainer.checkpoint import Checkpointer
from trainer.checkpoint.manifest import FileRecord, write_manifest
from trainer.parallel.mesh import Mesh

MakeCheckpointer = Callable[..., Checkpointer]


@pytest.fixture
def one_rank() -> Mesh:
    return Mesh(
        device=torch.device("cpu"), rank=0, world_size=1, dp_rank=0, dp_size=1, device_mesh=None, host_group=None
    )


@pytest.fixture
def make_checkpointer(tmp_path: Path, one_rank: Mesh) -> MakeCheckpointer:
    """`make_checkpointer(keep_last=2, ...)`: a checkpointer of the run directory `tmp_path`."""
    return lambda **options: Checkpointer(tmp_path, CheckpointConfig(**options), one_rank)


@pytest.fixture
def tensors_of() -> Callable[[float], dict[str, Tensor]]:
    """`tensors_of(value)`: a small model and its optimizer, filled with a value; all kinds of shape and dtype."""

    def make(number: float) -> dict[str, Tensor]:
        value = float(number)
        return {
            "model.weight": torch.nn.Parameter(torch.full((5, 3), value)),
            "model.norm": torch.full((3,), value, dtype=torch.bfloat16),
            "model.empty": torch.zeros(0, 3),
            "optimizer.exp_avg.weight": torch.full((5, 3), value, dtype=torch.float64),
            "optimizer.step.weight": torch.tensor(value),
            "optimizer.count": torch.tensor([int(number)]),
        }

    return make


@pytest.fixture
def forge() -> Callable[..., None]:
    """`forge(checkpoint, files={name: bytes}, state={...}, step=7)`: change a checkpoint as someone who knows the
    format would: sizes and checksums fit again."""

    def change(
        path: Path,
        *,
        files: dict[str, bytes] | None = None,
        records: dict[str, FileRecord] | None = None,
        **values: Any,
    ) -> None:
        manifest = json.loads((path / "state.json").read_text())
        if records is None:
            records = {name: FileRecord(**record) for name, record in manifest["files"].items()}
        for name, content in (files or {}).items():
            (path / name).write_bytes(content)
            records[name] = FileRecord.of(path / name)
        values = {"step": manifest["step"], "state": manifest["state"], "files": records} | values
        write_manifest(path, **values)

    return change
