"""Saving and loading on one rank."""

import errno
import json
import shutil
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from trainer.checkpoint import Checkpointer, checkpoint_size, find_checkpoint, read_state, tensor_writer
from trainer.checkpoint.folder import list_steps
from trainer.errors import RunError

Usage = namedtuple("Usage", "total used free")


def _silent(text: str) -> None:
    raise AssertionError(text)


def _assert_loads(loader: Checkpointer, path: Path, expected: dict[str, torch.Tensor]) -> None:
    loaded = {name: torch.full_like(tensor, 77).detach() for name, tensor in expected.items()}
    loader.load(path, loaded)
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor.detach()), name


@pytest.mark.parametrize("async_save", [True, False])
def test_round_trip(make_checkpointer: Any, tensors_of: Any, tmp_path: Path, async_save: bool) -> None:
    saver = make_checkpointer(async_save=async_save)
    saver.save(3, tensors_of(3), {"tokens": 12, "data": {"epoch": 0, "index": 5}, "loss": float("inf")})
    saver.wait()

    path = find_checkpoint(tmp_path, None, _silent)
    assert path == tmp_path / "checkpoints" / "step_3"
    assert read_state(path) == {"tokens": 12, "data": {"epoch": 0, "index": 5}, "loss": float("inf")}
    assert sorted(file.name for file in path.iterdir()) == [".metadata", "__0_0.distcp", "state.json"]
    _assert_loads(make_checkpointer(), path, tensors_of(3))
    saver.close()


def test_training_after_save_changes_nothing(
    make_checkpointer: Any, tensors_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case R64: weights += 1 right after an asynchronous save; the loaded ones are those at the save."""
    changed = threading.Event()

    def write_after_change(*args: Any, **kwargs: Any) -> Any:
        assert changed.wait(60)
        return write(*args, **kwargs)

    write = tensor_writer.save_tensors
    monkeypatch.setattr(tensor_writer, "save_tensors", write_after_change)
    tensors, state = tensors_of(1), {"skips": [[1, 2]]}
    saver = make_checkpointer()
    saver.save(1, tensors, state)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor += 1
    state["skips"].append([3, 4])
    changed.set()
    saver.wait()

    path = find_checkpoint(tmp_path, 1, _silent)
    _assert_loads(saver, path, tensors_of(1))
    assert read_state(path) == {"skips": [[1, 2]]}


def test_next_save_waits_for_the_last(
    make_checkpointer: Any, tensors_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The staging memory is used again: the second save must not write into what the first still reads."""
    saver = make_checkpointer()
    tensors = tensors_of(1)
    for step in range(1, 4):
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.fill_(step)
        saver.save(step, tensors, {})
        assert list_steps(tmp_path / "checkpoints")[: step - 1] == list(range(1, step))
    saver.wait()
    for step in range(1, 4):
        _assert_loads(saver, tmp_path / "checkpoints" / f"step_{step}", tensors_of(step))


def test_fresh_folder_keep_last(make_checkpointer: Any, tensors_of: Any, tmp_path: Path) -> None:
    """Field case R65: a fresh run directory, keep_last = 2, five saves: the newest two remain."""
    saver = make_checkpointer(keep_last=2)
    for step in range(1, 6):
        saver.save(step, tensors_of(step), {})
    saver.wait()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_4", "step_5"]


def test_asynchronous_and_inline_write_the_same(make_checkpointer: Any, tensors_of: Any, tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step_1"
    contents = []
    for async_save in (True, False):
        saver = make_checkpointer(async_save=async_save)
        saver.save(1, tensors_of(4), {"a": 1})
        saver.wait()
        manifest = json.loads((path / "state.json").read_text())
        # `.metadata` carries a number of its own for each save.
        shards = {name: record for name, record in manifest["files"].items() if name != ".metadata"}
        contents.append([(path / "__0_0.distcp").read_bytes(), manifest["state"], shards])
    assert contents[0] == contents[1]


def test_due(make_checkpointer: Any, tmp_path: Path, one_rank: Any) -> None:
    every_3 = make_checkpointer(interval=3)
    assert [step for step in range(10) if every_3.due(step)] == [3, 6, 9]
    assert not any(make_checkpointer().due(step) for step in range(10))
    off = Checkpointer(tmp_path / "off", None, one_rank)
    assert not off.due(3)
    assert not (tmp_path / "off").exists()


def test_same_step_twice_is_saved_once(make_checkpointer: Any, tensors_of: Any, tmp_path: Path) -> None:
    saver = make_checkpointer()
    saver.save(2, tensors_of(1), {})
    saver.save(2, tensors_of(9), {})
    saver.wait()
    _assert_loads(saver, tmp_path / "checkpoints" / "step_2", tensors_of(1))


def test_step_of_an_earlier_run_is_replaced(make_checkpointer: Any, tensors_of: Any, tmp_path: Path) -> None:
    earlier = make_checkpointer()
    earlier.save(2, tensors_of(1), {})
    earlier.wait()
    later = make_checkpointer()
    later.save(2, tensors_of(9), {})
    later.wait()
    _assert_loads(later, tmp_path / "checkpoints" / "step_2", tensors_of(9))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2"]


def test_rewind_replaces_later_steps(make_checkpointer: Any, tensors_of: Any, tmp_path: Path) -> None:
    """A run that goes back to step 1 and passes over rows has other weights at step 2 than before."""
    saver = make_checkpointer()
    saver.save(1, tensors_of(1), {})
    saver.save(2, tensors_of(2), {})
    saver.load(tmp_path / "checkpoints" / "step_1", tensors_of(0))
    saver.save(1, tensors_of(8), {})
    saver.save(2, tensors_of(9), {})
    saver.wait()
    _assert_loads(saver, tmp_path / "checkpoints" / "step_1", tensors_of(1))
    _assert_loads(saver, tmp_path / "checkpoints" / "step_2", tensors_of(9))


def test_leftovers_of_a_killed_run_go_at_start(make_checkpointer: Any, tensors_of: Any, tmp_path: Path) -> None:
    saver = make_checkpointer()
    saver.save(1, tensors_of(1), {})
    saver.wait()
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step_1", folder / ".step_2.tmp")
    shutil.copytree(folder / "step_1", folder / ".step_3.gone")
    shutil.copytree(folder / "step_1", folder / ".step_1.old")
    (folder / "step_1").rename(folder / ".step_4.old")
    (folder / "notes").mkdir()
    make_checkpointer()
    assert sorted(path.name for path in folder.iterdir()) == ["notes", "step_1", "step_4"]


def test_space_is_checked_at_start_and_before_a_save(
    make_checkpointer: Any, tensors_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case R67: a disk too small is found at the start, one that filled up before the next save."""
    saver = make_checkpointer()
    size = checkpoint_size(tensors_of(1), 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10 * size, 9 * size, size))
    saver.check_space(tensors_of(1))
    saver.save(1, tensors_of(1), {})
    saver.wait()

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10 * size, 9 * size, size - 1))
    expected = (
        f"not enough disk space for a checkpoint in {tmp_path / 'checkpoints'}: it needs 1.0 MiB, free are 1.0 MiB"
    )
    with pytest.raises(RunError) as at_start:
        saver.check_space(tensors_of(1))
    assert str(at_start.value) == expected
    with pytest.raises(RunError) as at_save:
        saver.save(2, tensors_of(2), {})
    assert str(at_save.value) == expected
    saver.save(1, tensors_of(1), {})  # already there: needs no space
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]


def test_size_is_an_upper_bound(make_checkpointer: Any, tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.attention.projection.weight": torch.zeros(64, 64) for i in range(200)}
    saver = make_checkpointer()
    saver.save(1, tensors, {})
    saver.wait()
    written = sum(file.stat().st_size for file in (tmp_path / "checkpoints" / "step_1").iterdir())
    assert 200 * 64 * 64 * 4 < written <= checkpoint_size(tensors, 1)


@pytest.mark.parametrize("async_save", [True, False])
def test_full_disk_keeps_the_old_checkpoint(
    make_checkpointer: Any, tensors_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    """Field case R67: no space left in the middle of a save: a RunError, and the old checkpoint is intact."""
    saver = make_checkpointer(async_save=async_save, keep_last=1)
    saver.save(1, tensors_of(1), {})
    saver.wait()

    class FullFile:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def write(self, data: bytes) -> int:
            if self._file.tell() > 2000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self._file.write(data)

    create_stream = FileSystem.create_stream

    class OneOpenFile:
        def __init__(self, opened: Any) -> None:
            self._opened = opened

        def __enter__(self) -> Any:
            return FullFile(self._opened.__enter__())

        def __exit__(self, *error: Any) -> Any:
            return self._opened.__exit__(*error)

    monkeypatch.setattr(
        FileSystem, "create_stream", lambda self, path, mode: OneOpenFile(create_stream(self, path, mode))
    )
    with pytest.raises(RunError) as raised:
        saver.save(2, tensors_of(2), {})
        saver.wait()
    assert str(raised.value) == (
        f"checkpoint step_2 could not be written to {tmp_path / 'checkpoints'}: No space left on device; "
        "earlier checkpoints are as they were"
    )
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]
    _assert_loads(saver, find_checkpoint(tmp_path, None, _silent), tensors_of(1))

    saver.save(2, tensors_of(2), {})  # space again
    saver.wait()
    assert list_steps(tmp_path / "checkpoints") == [2]


def test_error_of_the_writer_is_raised_by_the_next_save(
    make_checkpointer: Any, tensors_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    saver = make_checkpointer()
    monkeypatch.setattr(tensor_writer, "sync", fail)
    saver.save(1, tensors_of(1), {})
    with pytest.raises(RunError, match=r"step_1 could not be written to .*: Input/output error;"):
        saver.save(2, tensors_of(2), {})


def test_load_is_strict(make_checkpointer: Any, tensors_of: Any, tmp_path: Path) -> None:
    """Field case R72: what is missing, extra or different is named, and nothing is loaded."""
    saver = make_checkpointer()
    saver.save(1, tensors_of(1), {})
    saver.wait()
    path = tmp_path / "checkpoints" / "step_1"
    tensors = tensors_of(0)
    del tensors["model.empty"]
    tensors["model.weight"] = torch.zeros(4, 3)
    tensors["optimizer.exp_avg.weight"] = torch.zeros(5, 3)
    tensors |= {f"model.new.{i}": torch.zeros(1) for i in range(7)}
    with pytest.raises(RunError) as raised:
        saver.load(path, tensors)
    assert str(raised.value) == (
        f"checkpoint {path} does not fit this run: missing in the checkpoint: model.new.0, model.new.1, model.new.2, "
        "model.new.3, model.new.4, and 2 more; in the checkpoint only: model.empty; different: model.weight is (5, 3) "
        "float32, this run has (4, 3) float32, optimizer.exp_avg.weight is (5, 3) float64, this run has (5, 3) float32"
    )
    assert torch.equal(tensors["model.norm"], torch.zeros(3, dtype=torch.bfloat16))


def test_load_of_the_model_alone(make_checkpointer: Any, tensors_of: Any, tmp_path: Path) -> None:
    """`ckpt.skip_optimizer`: only names that begin as said may be left in the checkpoint."""
    saver = make_checkpointer()
    saver.save(1, tensors_of(1), {})
    saver.wait()
    path = tmp_path / "checkpoints" / "step_1"
    model = {name: tensor for name, tensor in tensors_of(0).items() if name.startswith("model.")}
    saver.load(path, model, ignore=("optimizer.",))
    assert torch.equal(model["model.weight"], torch.full((5, 3), 1.0))
    with pytest.raises(RunError, match=r"in the checkpoint only: optimizer\.count$"):
        saver.load(path, model, ignore=("optimizer.exp", "optimizer.step"))


def test_load_of_a_damaged_one_names_the_reason(make_checkpointer: Any, tensors_of: Any, tmp_path: Path) -> None:
    saver = make_checkpointer()
    saver.save(1, tensors_of(1), {})
    saver.wait()
    path = tmp_path / "checkpoints" / "step_1"
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").unlink()
    with pytest.raises(RunError) as raised:
        saver.load(path, tensors_of(0))
    assert str(raised.value) == f"checkpoint {path} cannot be loaded: state.json is missing"
    with pytest.raises(RunError, match=r"cannot be loaded: state.json is missing"):
        read_state(path)
    state["format"] = 1
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(RunError, match=r"state\.json has format 1; this version reads 2"):
        read_state(path)


def test_going_back_meets_no_checkpoint_of_an_earlier_attempt(
    make_checkpointer: Any, tensors_of: Any, tmp_path: Path
) -> None:
    """Resumed from step 2, a run goes back to what it came from or has written since, whatever else lies there."""
    saver = make_checkpointer(async_save=False)
    for step in (1, 2, 3, 4):
        saver.save(step, tensors_of(step), {})
    folder = tmp_path / "checkpoints"
    resumed = make_checkpointer(async_save=False)
    assert resumed.find(tmp_path) == folder / "step_4"
    resumed.load(resumed.find(tmp_path, step=2), tensors_of(0))
    assert resumed.find(tmp_path, at_most=3) == folder / "step_2"
    resumed.save(3, tensors_of(33), {})
    assert resumed.find(tmp_path, at_most=3) == folder / "step_3"
    resumed.load(folder / "step_3", tensors_of(0))
    assert resumed.find(tmp_path, at_most=9) == folder / "step_3"
    (folder / "step_3" / "state.json").write_text("")
    assert resumed.find(tmp_path, at_most=9) == folder / "step_2"
    resumed.load(folder / "step_2", tensors_of(0))
    assert resumed.find(tmp_path, at_most=1) == folder / "step_1"
