"""One of two ranks of test_checkpoint_ranks: python checkpoint_ranks_worker.py FOLDER RANK

FOLDER/one/checkpoints/step_1 was written by one process. Every check runs on both ranks; asserts say what must hold.
"""

import errno
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from configs.checkpoint import CheckpointConfig
from configs.sft import SFTConfig
from trainer.checkpoint import (
    Checkpointer,
    ModelRecord,
    checkpointer,
    find_checkpoint,
    read_state,
    tensor_writer,
)
from trainer.checkpoint.safe_reader import DamagedError
from trainer.errors import RunError
from trainer.parallel.mesh import Mesh
from trainer.snapshots import queue
from trainer.snapshots.writer import SnapshotWriter
from trainer.state import TrainState

SHAPES = {"even": (4, 3), "uneven": (5, 3), "one_row": (1, 3), "vector": (3,)}


def whole(name: str, value: float) -> torch.Tensor:
    """Every element tells where it belongs."""
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 100 * value


def plain_tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"model.{name}": whole(name, value) for name in SHAPES} | {"optimizer.step.even": torch.tensor(value)}


def sharded_tensors(device_mesh: DeviceMesh, value: float) -> dict[str, torch.Tensor]:
    sharded = {f"model.{name}": distribute_tensor(whole(name, value), device_mesh, [Shard(0)]) for name in SHAPES}
    return {**sharded, "optimizer.step.even": torch.tensor(value)}


def assert_equal(tensors: dict[str, torch.Tensor], value: float) -> None:
    for name, expected in plain_tensors(value).items():
        tensor = tensors[name]
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, expected), (name, full, expected)


def assert_fails(work: Callable[[], Any], expected: str) -> None:
    """Both ranks get the same error."""
    try:
        work()
    except RunError as error:
        assert str(error) == expected, str(error)
    else:
        raise AssertionError(f"no error: {expected}")


def check_resharding(root: Path, mesh: Mesh, device_mesh: DeviceMesh) -> None:
    """1 -> 2, then 2 -> 2 with training going on; the test process does 2 -> 1."""
    saver = Checkpointer(root / "two", CheckpointConfig(keep_last=2), mesh)
    tensors = sharded_tensors(device_mesh, -1.0)
    saver.load(root / "one" / "checkpoints" / "step_1", tensors)
    assert_equal(tensors, 1.0)

    saver.save(7, tensors, {"rank": mesh.rank})
    for tensor in tensors.values():
        tensor += 50
    for _ in range(20):  # collectives of the training thread, while the writer has its own
        dist.all_reduce(torch.ones(1))
    saver.wait()
    path = find_checkpoint(root / "two", None, print)
    assert path.name == "step_7"
    assert read_state(path) == {"rank": 0}
    assert {file.name for file in path.iterdir()} >= {".metadata", "__0_0.distcp", "__1_0.distcp", "state.json"}
    again = sharded_tensors(device_mesh, -1.0)
    saver.load(path, again)
    assert_equal(again, 1.0)


def check_fsdp(root: Path, mesh: Mesh, device_mesh: DeviceMesh) -> None:
    """Parameters and moments of a model under fully_shard, whose shards are views of padded storage."""

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        fully_shard(model, mesh=device_mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        tensors = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state[parameter].items():
                tensors[f"optimizer.{key}.{name}"] = value
        return model, optimizer, tensors

    model, optimizer, tensors = build(0)
    expected = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }
    saver = Checkpointer(root / "fsdp", CheckpointConfig(), mesh)
    saver.save(1, tensors, {})
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    _, _, other = build(1)
    saver.wait()
    saver.load(root / "fsdp" / "checkpoints" / "step_1", other)
    for name, tensor in other.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, expected[name]), name


def check_failures(root: Path, mesh: Mesh, device_mesh: DeviceMesh) -> None:
    """Field case R67: what fails on rank 1 alone is raised on both, and the old checkpoint is intact."""
    run_dir = root / "failing"
    saver = Checkpointer(run_dir, CheckpointConfig(keep_last=1), mesh)
    tensors = sharded_tensors(device_mesh, 3.0)
    saver.save(1, tensors, {})
    saver.wait()

    sync, disk_usage = tensor_writer.sync, shutil.disk_usage

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if mesh.rank == 1:
        tensor_writer.sync = full
    saver.save(2, tensors, {})
    assert_fails(
        lambda: saver.save(3, tensors, {}),
        f"checkpoint step_2 could not be written to {run_dir / 'checkpoints'}: No space left on device; "
        "earlier checkpoints are as they were",
    )
    tensor_writer.sync = sync

    if mesh.rank == 1:
        shutil.disk_usage = lambda path: disk_usage(path)._replace(free=2**19)
    expected = (
        f"not enough disk space for a checkpoint in {run_dir / 'checkpoints'}: it needs 1.0 MiB, free are 0.5 MiB"
    )
    assert_fails(lambda: saver.check_space(tensors), expected)
    shutil.disk_usage = disk_usage

    other = sharded_tensors(device_mesh, 0.0)
    path = run_dir / "checkpoints" / "step_1"
    if mesh.rank == 1:
        other["optimizer.step.even"] = torch.zeros(1)
    assert_fails(
        lambda: saver.load(path, other),
        f"checkpoint {path} does not fit this run: different: optimizer.step.even is () float32, this run has (1,) "
        "float32",
    )
    read_manifest = checkpointer.read_manifest

    def not_here(path: Path) -> dict[str, Any]:
        raise DamagedError("state.json is missing")

    if mesh.rank == 1:
        checkpointer.read_manifest = not_here
    assert_fails(
        lambda: saver.find(run_dir, step=1),
        f"checkpoint {path} is damaged: state.json is missing, as rank 1 sees it",
    )
    checkpointer.read_manifest = read_manifest
    assert saver.find(run_dir, step=1) == path
    assert [entry.name for entry in (run_dir / "checkpoints").iterdir()] == ["step_1"]
    other = sharded_tensors(device_mesh, 0.0)
    saver.load(path, other)
    assert_equal(other, 3.0)


def check_weights(root: Path, mesh: Mesh, device_mesh: DeviceMesh) -> None:
    """`ckpt.weights` of sharded tensors. Rank 0 gives word in the middle of a long export, so that the other one's
    collectives do not time out; what fails on it is raised on both."""
    record = ModelRecord(config={"model_type": "llama"}, tokenizer=None, compute_dtype="float32")
    config = CheckpointConfig.model_validate({"weights": True, "async_save": False})
    saver = Checkpointer(root / "weights", config, mesh, record)
    checkpointer._WORD_SECONDS = 0.0
    tensors = sharded_tensors(device_mesh, 4.0)
    words: list[Any] = []
    agree = checkpointer.agree

    def listen(mesh: Mesh, action: Callable[[], Any]) -> list[Any]:
        answers = agree(mesh, action)
        words.append(answers[0])
        return answers

    checkpointer.agree = listen
    saver.save(1, tensors, {})
    assert [word for word in words if isinstance(word, bool)][-len(SHAPES) - 1 :] == [False] * len(SHAPES) + [True]
    exported = load_file(root / "weights" / "weights" / "step_1" / "model.safetensors")
    assert sorted(exported) == sorted(SHAPES)
    for name, tensor in exported.items():
        assert torch.equal(tensor, whole(name, 4.0)), name
    checkpointer.agree = agree
    dist.barrier()

    if mesh.rank == 0:
        (root / "weights" / "weights" / ".step_2.tmp").write_text("in the way")
    target = root / "weights" / "weights" / "step_2"
    assert_fails(
        lambda: saver.save(2, tensors, {}),
        f"ckpt.weights of step 2: {target} could not be written: Not a directory: {target.with_name('.step_2.tmp')}; "
        "its checkpoint is written",
    )


class Weights:
    """Stands for a run's state: tensors of the model and of the optimizer."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors

    def model_tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self._tensors.items() if name.startswith("model.")}


def check_snapshots(root: Path, mesh: Mesh, device_mesh: DeviceMesh) -> None:
    """A checkpoint and a snapshot of one step, both in the background while the weights change; what fails on rank 1
    alone is raised on both."""
    run_dir = root / "snapshots"
    tables = {"data": {"type": "fake", "batch_size": 2}, "max_steps": 4, "ckpt": {}, "eval_snapshots": {"interval": 2}}
    config = SFTConfig.model_validate(tables)
    record = ModelRecord(config={"model_type": "llama"}, tokenizer=None, compute_dtype="float32")
    saver = Checkpointer(run_dir, config.ckpt, mesh, record)
    tensors = sharded_tensors(device_mesh, 5.0)
    state = cast(TrainState, Weights(tensors))
    snapshots = SnapshotWriter(run_dir, config, state, saver, mesh, record, total_steps=4)
    snapshots.go_on_from(0)
    snapshots.check_space()
    saver.save(2, tensors, {})
    snapshots.save(2, f"id of rank {mesh.rank}")
    for tensor in tensors.values():
        tensor += 50
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
    saver.wait()
    path = queue.snapshot_path(run_dir, 2)
    assert read_state(path) == {"model": record.to_json(), "wandb_id": "id of rank 0"}
    again = Weights(sharded_tensors(device_mesh, -1.0))
    saver.load(path, again.model_tensors())
    assert_equal(again.tensors() | {"optimizer.step.even": torch.tensor(5.0)}, 5.0)
    saver.load(run_dir / "checkpoints" / "step_2", again.tensors())
    assert_equal(again.tensors(), 5.0)

    sync = tensor_writer.sync

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    snapshots.save(3, None)
    saver.wait()
    if mesh.rank == 1:
        tensor_writer.sync = full
    snapshots.save(4, None)
    assert_fails(saver.wait, f"snapshot step_4 could not be written to {path.parent}: No space left on device")
    tensor_writer.sync = sync
    assert queue.waiting(run_dir) == [2, 3] and not queue.is_over(run_dir)
    dist.barrier()
    snapshots.go_on_from(2)
    assert queue.waiting(run_dir) == [2]
    snapshots.make_up(4, None, scored=False)
    saver.wait()
    assert queue.waiting(run_dir) == [2, 4] and queue.final_step(run_dir) == 4


def main(root: Path, rank: int) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{root / 'store'}", rank=rank, world_size=2, timeout=timeout)
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    mesh = Mesh(
        device=torch.device("cpu"),
        rank=rank,
        world_size=2,
        dp_rank=rank,
        dp_size=2,
        device_mesh=device_mesh,
        host_group=dist.new_group(backend="gloo", timeout=timeout),
    )
    for check in (check_resharding, check_fsdp, check_failures, check_weights, check_snapshots):
        check(root, mesh, device_mesh)
        dist.barrier()
    dist.destroy_process_group()
    print("all checks passed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
