"""Exports of damaged or hostile checkpoints, on full disks, and how much memory one takes."""

import errno
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.checkpoint import CheckpointConfig
from trainer.checkpoint import Checkpointer, ModelRecord
from trainer.checkpoint.export import plan_export, write_export
from trainer.checkpoint.manifest import FileRecord, file_records, read_manifest, write_manifest
from trainer.checkpoint.tensor_reader import TensorReader
from trainer.errors import RunError
from trainer.export.command import run_export
from trainer.parallel.mesh import one_rank_mesh

RECORD = ModelRecord(config={"model_type": "llama"}, tokenizer=None, compute_dtype="float32")


def save(run_dir: Path, tensors: dict[str, Tensor]) -> Path:
    mesh = one_rank_mesh(torch.device("cpu"))
    saver = Checkpointer(run_dir, CheckpointConfig(async_save=False), mesh, RECORD)
    saver.save(1, tensors, {})
    return run_dir / "checkpoints" / "step_1"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path / "run", {f"model.layer.{i}": torch.full((100, 10), float(i)) for i in range(10)})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail(argv: list[object], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert run_export([str(argument) for argument in argv]) == 1
    return capsys.readouterr().err.rstrip("\n")


def test_a_flipped_bit_is_found(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also in the middle of the numbers."""
    path = checkpoint / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(torch.full((100,), 7.0).numpy().tobytes()) + 40] ^= 1
    path.write_bytes(content)
    message = fail([checkpoint, "--output-dir", tmp_path / "hf"], capsys)
    assert message.startswith(
        f"checkpoint {checkpoint} cannot be exported: __0_0.distcp holds other bytes than were written (checksum "
    )
    assert names(tmp_path) == ["run"]


class Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


def forge(checkpoint: Path, name: str, content: bytes) -> None:
    manifest = read_manifest(checkpoint)
    (checkpoint / name).write_bytes(content)
    files = file_records(manifest) | {name: FileRecord.of(checkpoint / name)}
    write_manifest(checkpoint, step=1, state=manifest["state"], files=files)


def test_planted_pickles_are_refused(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In `.metadata`, and in place of a tensor's description; sizes and checksums are forged too."""
    target = tmp_path / "planted"
    content = (checkpoint / "__0_0.distcp").read_bytes()
    arguments = [checkpoint, "--output-dir", tmp_path / "hf"]
    # A pickle of the same length in each tensor's data.pkl: zip files do not mind.
    start = content.index(b"ctorch._utils\n_rebuild_tensor_v2\n")
    end = content.index(b".PK", start)
    payload = pickle.dumps(Payload(target), protocol=2)[2:-1]
    forge(checkpoint, "__0_0.distcp", content[:start] + payload.ljust(end - start, b"N")[: end - start] + content[end:])
    assert "is not stored as .metadata says: the file is damaged" in fail(arguments, capsys)
    forge(checkpoint, ".metadata", pickle.dumps(Payload(target)))
    assert "refused: .metadata names posix.system" in fail(arguments, capsys)
    assert not target.exists()
    assert names(tmp_path) == ["run"]


@pytest.mark.parametrize("kind", ["dtype", "shape", "shift"])
def test_tensors_that_are_not_what_metadata_says(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Never numbers of another tensor or dtype, which would export as plausible nonsense."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["model.layer.3"]
    infos = {index.fqn: info for index, info in metadata.storage_data.items()}
    if kind == "dtype":
        entry.properties.dtype = torch.int32
    elif kind == "shape":
        entry.size = torch.Size([10, 100])
        entry.chunks[0].sizes = torch.Size([10, 100])
    else:
        infos["model.layer.3"].offset += 1
    forge(checkpoint, ".metadata", pickle.dumps(metadata))
    message = fail([checkpoint, "--output-dir", tmp_path / "hf"], capsys)
    assert "model.layer.3 in " in message
    assert "is not stored as .metadata says: the file is damaged" in message
    assert names(tmp_path) == ["run"]


def test_a_number_beyond_float16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused, as infinity is another model; one that is infinite already stays so."""
    weights = {"model.a": torch.tensor([1.0, float("inf")]), "model.b": torch.tensor([1e6]), "model.n": torch.arange(3)}
    path = save(tmp_path / "run", weights)
    message = fail([path, "--output-dir", tmp_path / "hf", "--dtype", "float16"], capsys)
    assert message == (
        f"{tmp_path / 'hf'} could not be written: b has numbers beyond the range of float16; export in bfloat16 or "
        "float32"
    )
    assert names(tmp_path) == ["run"]


def test_integers_keep_their_dtype(tmp_path: Path) -> None:
    """Field case R71: an integer buffer is not a weight."""
    from safetensors.torch import load_file

    weights = {"model.n": torch.arange(3), "model.w": torch.ones(2), "model.s": torch.tensor(2.5)}
    path = save(tmp_path / "run", weights | {"optimizer.w": torch.ones(2)})
    assert run_export([str(path), "--dtype", "bfloat16"]) == 0
    found = load_file(tmp_path / "run" / "exports" / "step_1" / "model.safetensors")
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in found.items()} == {
        "n": (torch.int64, [0, 1, 2]),
        "w": (torch.bfloat16, [1.0, 1.0]),
        "s": (torch.bfloat16, 2.5),
    }


def test_no_space_in_the_middle(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Field case R67: a disk that fills up: an error, no half folder, and an earlier export is as it was."""
    arguments = [checkpoint, "--output-dir", tmp_path / "hf"]
    assert run_export([str(argument) for argument in arguments]) == 0
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainer.weights.write.os.fsync", full)
    message = fail([*arguments, "--clean"], capsys)
    assert message == f"{tmp_path / 'hf'} could not be written: No space left on device"
    assert names(tmp_path) == ["hf", "run"]
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Field case R67, on a file system that is really too small: seen before, and when it fills up meanwhile."""
    path = save(tmp_path / "run", {f"model.{i}": torch.ones(2**18) for i in range(6)})
    arguments = [path, "--output-dir", small_disk / "hf"]
    assert fail(arguments, capsys) == (
        f"{small_disk / 'hf'} could not be written: not enough disk space for an export in {small_disk}: it needs "
        "7.0 MiB, free are 4.0 MiB"
    )
    monkeypatch.setattr("trainer.checkpoint.export.require_space", lambda *arguments: None)
    assert fail(arguments, capsys) == f"{small_disk / 'hf'} could not be written: No space left on device"
    assert names(small_disk) == []

    # Checkpoints on the same disk: one fits, the second does not, and the first is whole.
    monkeypatch.setattr("trainer.checkpoint.checkpointer.require_space", lambda *arguments: None)
    saver = Checkpointer(small_disk, CheckpointConfig(), one_rank_mesh(torch.device("cpu")), RECORD)
    tensors = {f"model.{i}": torch.ones(2**18) for i in range(3)}
    saver.save(1, tensors, {})
    saver.save(2, tensors, {})
    with pytest.raises(RunError, match=r"step_2 could not be written to .*: No space left on device; earlier"):
        saver.wait()
    assert names(small_disk / "checkpoints") == ["step_1"]
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    saver.load(saver.find(small_disk), loaded)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


class KilledHereError(BaseException):
    """Stands for kill -9."""


def test_killed_at_any_call(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder has its name only when it is whole; the next export clears what is left."""
    out = tmp_path / "out" / "hf"
    at = seen = 0

    def killing(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == at:
                raise KilledHereError
            return call(*args, **options)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoint.export.sync", killing(lambda path: None))
        patch.setattr("trainer.weights.write.os.fsync", killing(lambda descriptor: None))
        patch.setattr(TensorReader, "read", killing(TensorReader.read))
        patch.setattr(Path, "rename", killing(Path.rename))
        for count in range(1, 100):
            at, seen = count, 0
            try:
                write_export(plan_export(checkpoint, None), out, None, max_shard_bytes=9000)
                break
            except KilledHereError:
                assert [path for path in names(out.parent) if not path.startswith(".")] in ([], ["hf"])
                if out.exists():
                    assert len(list(out.glob("*.safetensors"))) == 5
                    shutil.rmtree(out)
        assert at > 20
    assert names(out.parent) == ["hf"]


def _peak_kib() -> int:
    """Peak resident memory of this process since `_reset_peak`."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1])


def test_memory_is_that_of_a_tensor(tmp_path: Path) -> None:
    """A model of 256 MiB in one shard is exported with the memory of a few of its tensors of 8 MiB.

    All its bytes at once would be 128 MiB."""
    reset = Path("/proc/self/clear_refs")
    if not os.access(reset, os.W_OK):
        pytest.skip("the peak of the resident memory cannot be reset here")
    path = save(tmp_path / "run", {f"model.{i}": torch.ones(2**21) for i in range(32)})
    export = plan_export(path, "bfloat16")
    write_export(plan_export(save(tmp_path / "warm", {"model.a": torch.ones(2)}), None), tmp_path / "hf", None)
    reset.write_text("5")
    before = _peak_kib()
    write_export(export, tmp_path / "hf", None)
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > 2**27
    assert _peak_kib() - before < 48 * 1024
