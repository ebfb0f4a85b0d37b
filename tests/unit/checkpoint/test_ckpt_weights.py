"""`ckpt.weights`: a Hugging Face folder beside each checkpoint, written and removed with it."""

import errno
import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from configs.checkpoint import CheckpointConfig
from configs.errors import ConfigError
from trainer.checkpoint import Checkpointer, ModelRecord, checkpoint_size
from trainer.errors import RunError
from trainer.parallel.mesh import Mesh

Usage = namedtuple("Usage", "total used free")
Make = Callable[..., Checkpointer]


@pytest.fixture
def make(tmp_path: Path, one_rank: Mesh) -> Make:
    """`make(keep_last=2, ...)`: a checkpointer of the run directory `tmp_path`, with `weights`."""

    def build(tokenizer: str | None = None, **options: Any) -> Checkpointer:
        record = ModelRecord(config={"model_type": "llama"}, tokenizer=tokenizer, compute_dtype="bfloat16")
        return Checkpointer(tmp_path, CheckpointConfig.model_validate({"weights": True} | options), one_rank, record)

    return build


def weights(tmp_path: Path) -> dict[int, float]:
    """step -> the value that its weights are filled with."""
    found = {}
    for path in (tmp_path / "weights").iterdir():
        tensors = load_file(path / "model.safetensors")
        assert sorted(tensors) == ["empty", "norm", "weight"]
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
        found[int(path.name.removeprefix("step_"))] = tensors["weight"][0, 0].item()
    return dict(sorted(found.items()))


def save(saver: Checkpointer, tensors: dict[str, torch.Tensor], step: int) -> None:
    saver.save(step, tensors, {})
    saver.wait()


@pytest.mark.parametrize("async_save", [True, False])
def test_beside_every_checkpoint(make: Make, tensors_of: Any, tmp_path: Path, async_save: bool) -> None:
    saver = make(async_save=async_save)
    for step in (1, 2, 3):
        saver.save(step, tensors_of(10 * step), {})
    saver.wait()
    assert weights(tmp_path) == {1: 10.0, 2: 20.0, 3: 30.0}


def test_off_by_default(make: Make, tensors_of: Any, tmp_path: Path) -> None:
    save(make(weights=False), tensors_of(1), 1)
    assert not (tmp_path / "weights").exists()


def test_the_next_save_waits(make: Make, tensors_of: Any, tmp_path: Path) -> None:
    """When `save` of a step returns, the weights of the step before are there."""
    saver = make()
    saver.save(1, tensors_of(1), {})
    saver.save(2, tensors_of(2), {})
    assert (tmp_path / "weights" / "step_1" / "model.safetensors").exists()
    saver.wait()
    assert weights(tmp_path) == {1: 1.0, 2: 2.0}


def test_they_go_with_their_checkpoint(make: Make, tensors_of: Any, tmp_path: Path) -> None:
    """Field case R65, for weights: a fresh folder, keep_last = 2 and keep_interval = 3, seven saves."""
    saver = make(keep_last=2, keep_interval=3)
    (tmp_path / "weights" / "step_99").mkdir(parents=True)  # of no checkpoint here: not ours to judge
    for step in range(1, 8):
        saver.save(step, tensors_of(step), {})
    saver.wait()
    (tmp_path / "weights" / "step_99").rmdir()
    assert weights(tmp_path) == {3: 3.0, 6: 6.0, 7: 7.0}
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_3", "step_6", "step_7"]


def test_a_replaced_checkpoint_replaces_its_weights(
    make: Make, tensors_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never the weights of an earlier attempt beside a newer checkpoint, even if the new ones fail."""
    save(make(), tensors_of(1), 5)
    save(make(), tensors_of(2), 5)
    assert weights(tmp_path) == {5: 2.0}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainer.weights.write.os.fsync", lambda descriptor: None)
    saver = make()
    with monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoint.export.sync", full)
        saver.save(5, tensors_of(3), {})
        with pytest.raises(RunError) as raised:
            saver.wait()
    assert str(raised.value) == (
        f"ckpt.weights of step 5: {tmp_path / 'weights' / 'step_5'} could not be written: No space left on device; its "
        "checkpoint is written"
    )
    assert weights(tmp_path) == {}
    loaded = tensors_of(0)
    saver.load(saver.find(tmp_path), loaded)
    assert loaded["model.weight"][0, 0] == 3


def test_made_up_on_resume(make: Make, tensors_of: Any, tmp_path: Path) -> None:
    """A run killed between a checkpoint and its weights; of a fork nothing is made up."""
    saver = make()
    for step in (1, 2):
        save(saver, tensors_of(step), step)
    shutil.rmtree(tmp_path / "weights" / "step_1")
    (tmp_path / "weights" / "step_2").rename(tmp_path / "weights" / ".step_2.tmp")
    resumed = make()
    assert list((tmp_path / "weights").iterdir()) == []
    resumed.make_up_weights(resumed.find(tmp_path))
    resumed.wait()
    assert weights(tmp_path) == {2: 2.0}

    before = (tmp_path / "weights" / "step_2" / "model.safetensors").stat().st_mtime_ns
    resumed.make_up_weights(resumed.find(tmp_path))
    resumed.wait()
    assert (tmp_path / "weights" / "step_2" / "model.safetensors").stat().st_mtime_ns == before

    other = tmp_path / "other"
    shutil.copytree(tmp_path / "checkpoints", other / "checkpoints")
    resumed.make_up_weights(resumed.find(other, step=1))
    resumed.wait()
    assert weights(tmp_path) == {2: 2.0}
    off = make(weights=False)
    off.make_up_weights(off.find(tmp_path, step=1))
    off.wait()
    assert weights(tmp_path) == {2: 2.0}


def test_the_disk_must_hold_both(make: Make, tensors_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case R67: checked at start and before a save."""
    saver = make()
    elements = 5 * 3 + 3
    needed = checkpoint_size(tensors_of(1), 1) + 2 * elements + 2**26
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(needed, 0, needed))
    saver.check_space(tensors_of(1))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(needed, 1, needed - 1))
    for work in (lambda: saver.check_space(tensors_of(1)), lambda: saver.save(1, tensors_of(1), {})):
        with pytest.raises(RunError, match=r"not enough disk space for a checkpoint in .*: it needs 65\.\d MiB"):
            work()


def test_the_tokenizer_lies_beside(
    make: Make, tensors_of: Any, tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read once, at start: a tokenizer that cannot be read is a fault then, not after hours."""
    with pytest.raises(ConfigError, match=r"tokenizer\.name: there is no folder \./nowhere"):
        make(tokenizer="./nowhere")
    saver = make(tokenizer=str(tiny_tokenizer))
    monkeypatch.setattr("trainer.weights.tokenizer_files.load_tokenizer", lambda name: pytest.fail("read again"))
    for step in (1, 2):
        save(saver, tensors_of(step), step)
        folder = tmp_path / "weights" / f"step_{step}"
        assert json.loads((folder / "tokenizer.json").read_text())["model"]["type"] == "BPE"
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0
