"""One rank of test_gradient_equivalence: loss and gradients of one global batch, weights after some steps, or a
checkpoint handed on, under several settings.

Usage: gradient_worker.py OUT SETTINGS_JSON, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from configs.checkpoint import CheckpointConfig
from configs.data import FakeDataConfig
from configs.model import ModelConfig
from configs.optim import AdamWConfig
from models.base import CausalLM
from models.batch import IGNORE_INDEX
from models.init import init_weights
from models.registry import build_config
from trainer.checkpoint import Checkpointer
from trainer.checkpoint.safe_reader import read_metadata
from trainer.data.build import build_source
from trainer.data.loader import RowLoader
from trainer.data.row import Rows, RowSource
from trainer.micro_batch import run_micro_batches
from trainer.model_setup import build_parallel_model
from trainer.optim.build import build_optimizer
from trainer.optim.gradients import clip_gradients, gradient_norms
from trainer.parallel.checksum import checksum_sums, read_checksum
from trainer.parallel.data_parallel import GradSync
from trainer.parallel.mesh import Mesh, build_mesh, lay_out_ranks

BATCH_SIZE, SEQ_LEN = 8, 24
MAX_NORM = 0.5
ARCH = {
    "model_type": "qwen3",
    "vocab_size": 67,
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
}

# What qwen3 has not: biases; layers that do not rotate, and a scaled RoPE.
FAMILIES = {
    "qwen3": {},
    "qwen2": {"model_type": "qwen2"},
    "smollm3": {
        "model_type": "smollm3",
        "no_rope_layers": [0, 1],
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}


class Masked:
    """Rows of another source; those from place `first` of each step on carry no loss."""

    def __init__(self, source: RowSource, first: int) -> None:
        self._source, self._first = source, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def fill(self, epoch: int, indices: np.ndarray, out: Rows) -> None:
        self._source.fill(epoch, indices, out)
        out.labels[: len(indices)][indices % BATCH_SIZE >= self._first] = IGNORE_INDEX


def build(mesh: Mesh, setting: dict) -> tuple[CausalLM, GradSync, RowLoader]:
    arch = ARCH | FAMILIES[setting["family"]] | {"tie_word_embeddings": setting["tied"]}
    model_config = build_config(arch, tokenizer_length=None, special_ids={})
    config = ModelConfig.model_validate(
        {
            "arch": arch,
            "init": {},
            "optimization_dtype": setting["masters"],
            "defer_grad_sync": setting["defer"] == "all",
            "defer_replicate_sync": setting["defer"] == "replicas",
            "dp_replicate": setting["replicas"],
            "cp": setting["cp"],
            "cp_style": setting["cp_style"],
            "ac": {"mode": setting["ac"]} if setting["ac"] else None,
        }
    )
    model, grad_sync = build_parallel_model(config, model_config, seq_len=SEQ_LEN, mesh=mesh)
    masters = {name: grad_sync.as_global(name, master) for name, master in grad_sync.masters.items()}
    assert {str(master.dtype) for master in masters.values()} == {f"torch.{setting['masters']}"}
    init_weights(masters, std=0.2, seed=3, rules=model.init_rules())
    grad_sync.publish()
    data = FakeDataConfig(
        type="fake", seq_len=SEQ_LEN, batch_size=BATCH_SIZE, length="variable", input_ids="random", num_rows=100
    )
    source = build_source(data, vocab_size=model_config.vocab_size, eos_token_id=None, tokenizer_name=None)
    loader = RowLoader(
        cast(RowSource, Masked(source, setting.get("masked_from", BATCH_SIZE))),
        batch_size=BATCH_SIZE,
        micro_batch_size=setting["micro_batch_size"],
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        num_workers=0,
        pin_memory=False,
    )
    return model, grad_sync, loader


def whole(grad_sync: GradSync, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: full(grad_sync.as_global(name, part)) for name, part in parts.items()}


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def measure(mesh: Mesh, setting: dict) -> dict[str, Tensor]:
    """Gradients of one global batch by parameter name, in the masters' dtype; "loss" (mean over loss tokens), "norm"
    (of the whole gradient) and, as "clipped.<name>", the gradients clipped to MAX_NORM."""
    model, grad_sync, loader = build(mesh, setting)
    batches = loader.step(5)
    micro_batches, num_loss_tokens = batches.micro_batches, batches.num_loss_tokens
    if setting.get("only_first"):
        micro_batches, num_loss_tokens = micro_batches[:1], micro_batches[0].num_loss_tokens
    result = run_micro_batches(model, micro_batches, num_loss_tokens, grad_sync, mesh)
    parts = grad_sync.gradients()
    norm = gradient_norms(parts, result.nats, result.loss_tokens, mesh).total
    measured = whole(grad_sync, parts)
    clip_gradients(parts, norm, MAX_NORM)
    measured |= {f"clipped.{name}": tensor for name, tensor in whole(grad_sync, parts).items()}
    return measured | {"loss": mesh.sum_(result.nats) / result.loss_tokens, "norm": norm}


class Training:
    """A model, its optimizer and its rows, in the layout that a setting asks for."""

    def __init__(self, mesh: Mesh, setting: dict) -> None:
        self.mesh = mesh
        self.model, self.grad_sync, self.loader = build(mesh, setting)
        num_dims = {name: parameter.dim() for name, parameter in self.model.named_parameters()}
        self.optimizer = build_optimizer(AdamWConfig(lr=1e-2, eps=1e-5), self.grad_sync.masters, num_dims)

    def step(self, step: int) -> None:
        batches = self.loader.step(step)
        result = run_micro_batches(
            self.model, batches.micro_batches, batches.num_loss_tokens, self.grad_sync, self.mesh
        )
        gradients = self.grad_sync.gradients()
        norms = gradient_norms(gradients, result.nats, result.loss_tokens, self.mesh)
        clip_gradients(gradients, norms.total, MAX_NORM)
        self.optimizer.step(gradients, 1e-2, norms.update_ok)
        self.grad_sync.clear_gradients()
        self.grad_sync.publish()

    def tensors(self) -> dict[str, Tensor]:
        """Those of a checkpoint, views of the live ones."""
        tensors = {name: self.grad_sync.as_global(name, master) for name, master in self.grad_sync.masters.items()}
        for kind, moments in self.optimizer.moments().items():
            for name, moment in moments.items():
                tensors[f"{kind}.{name}"] = self.grad_sync.as_global(name, moment)
        return tensors | {f"step.{name}": count for name, count in self.optimizer.step_counts().items()}

    def checksum(self) -> Tensor | None:
        """(2,) lanes of the parameters' checksum; None if the replicas' parameters differ."""
        parts = {name: self.grad_sync.as_global(name, master) for name, master in self.grad_sync.masters.items()}
        sums = {name: self.mesh.sum_(lane).item() for name, lane in checksum_sums(parts, self.mesh).items()}
        lanes = read_checksum(sums, self.mesh)
        return None if lanes is None else torch.tensor(lanes) % 2**32


def take_steps(mesh: Mesh, setting: dict, folder: Path) -> dict[str, Tensor]:
    """Float64 weights by parameter name after `setting["steps"]` optimizer steps, and "updates", how many changed them.

    While no step has changed a weight also "checksum", the two lanes of the parameters' checksum.

    With "reload" the run is saved after its first step, spoilt, and loaded again.
    """
    training = Training(mesh, setting)
    checkpointer = Checkpointer(folder, CheckpointConfig(async_save=False), mesh)
    for step in range(setting["steps"]):
        training.step(step)
        if setting.get("reload") and step == 0:
            tensors = training.tensors()
            checkpointer.save(1, tensors, {})
            for tensor in tensors.values():
                tensor.zero_()
            checkpointer.load(folder / "checkpoints" / "step_1", tensors)
            training.grad_sync.publish()
    assert len(training.model.vocabulary_matrices) == (1 if setting["tied"] else 2)
    every_name = [name for name, _ in training.model.named_parameters(remove_duplicate=False)]
    assert every_name == list(training.grad_sync.masters)
    counts = {count.item() for count in training.optimizer.step_counts().values()}
    weights = whole(training.grad_sync, training.grad_sync.masters)
    checksum = training.checksum()
    assert checksum is not None, "the replicas are equal bit for bit"
    if counts == {0}:  # later weights are only equal to 1e-12, their checksums not at all
        weights["checksum"] = checksum
    return weights | {"updates": torch.tensor(sorted(counts), dtype=torch.float64)}


def relay(mesh_of: Callable[[dict], Mesh], setting: dict, folder: Path) -> dict[str, Tensor]:
    """Hand the checkpoint at `setting["relay"]` from one of `setting["layouts"]` to the next: each loads and saves it.

    What each has loaded is equal bit for bit to what it was given. The last one's is at step_<number of layouts>.
    """
    path, tensors, expected = Path(setting["relay"]), {}, {}
    for number, layout in enumerate(setting["layouts"], start=1):
        mesh = mesh_of(setting | layout)
        tensors = Training(mesh, setting | layout).tensors()
        for tensor in tensors.values():
            tensor.zero_()
        checkpointer = Checkpointer(folder, CheckpointConfig(async_save=False), mesh)
        checkpointer.load(path, tensors)
        found = {name: full(tensor) for name, tensor in tensors.items()}
        different = [name for name in found if not torch.equal(found[name], expected.get(name, found[name]))]
        assert different == [], (layout, different)
        expected = found
        checkpointer.save(number, tensors, {})
        path = folder / "checkpoints" / f"step_{number}"
        if mesh.rank == 0:
            check_written_once(path, found)
    return expected


def check_written_once(path: Path, tensors: dict[str, Tensor]) -> None:
    """Each element of each tensor lies in one file, and the files hold nothing else."""
    metadata = read_metadata(path)
    for name, tensor in tensors.items():
        chunks = cast(TensorStorageMetadata, metadata.state_dict_metadata[name]).chunks
        assert sum(chunk.sizes.numel() for chunk in chunks) == tensor.numel(), name
    stored = sum(info.length for info in metadata.storage_data.values())
    assert sum(file.stat().st_size for file in path.glob("*.distcp")) == stored


def main() -> None:
    torch.set_num_threads(1)
    mesh = build_mesh(60)
    if mesh.world_size == 1:
        dist.init_process_group("gloo")
    settings = json.loads(sys.argv[2])

    @cache
    def lay_out(replicas: int, cp: int) -> Mesh:
        assert mesh.host_group is not None
        return lay_out_ranks(mesh.device, mesh.host_group, dp_replicate=replicas, cp=cp)

    def mesh_of(setting: dict) -> Mesh:
        if setting.get("sharded_at_one_rank"):
            return replace(mesh, device_mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",)))
        return mesh if mesh.world_size == 1 else lay_out(setting["replicas"], setting["cp"])

    results = []
    for setting in settings:
        folder = Path(sys.argv[1]).parent / f"run_{mesh.world_size}_{len(results)}"
        if "relay" in setting:
            results.append(relay(mesh_of, setting, folder))
        elif "steps" in setting:
            results.append(take_steps(mesh_of(setting), setting, folder))
        else:
            results.append(measure(mesh_of(setting), setting))
    if mesh.rank == 0:
        torch.save(results, sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
