"""Checkpoints with flipped bytes, links and pipes: a message, never a traceback, never garbage."""

import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.errors import ConfigError
from trainer.checkpoint import find_checkpoint, read_state
from trainer.checkpoint.checksum import checksum
from trainer.errors import RunError

FLIPS = 60
"""Of each file."""


@pytest.fixture
def run_dir(make_checkpointer: Any, tensors_of: Any, tmp_path: Path) -> Path:
    """Whole checkpoints of steps 1 and 2."""
    saver = make_checkpointer()
    for step in (1, 2):
        saver.save(step, tensors_of(step), {"value": step, "skips": [[1, 2]], "note": "é"})
    saver.wait()
    return tmp_path


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.json"])
def test_flipped_bytes(
    run_dir: Path, make_checkpointer: Any, tensors_of: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Any one byte of any file changed: the checkpoint is passed over with a message, or refused if asked for."""
    loader = make_checkpointer()
    path = run_dir / "checkpoints" / "step_2" / name
    whole = path.read_bytes()
    generator = random.Random(name)
    for _ in range(FLIPS):
        changed = bytearray(whole)
        changed[generator.randrange(len(whole))] ^= generator.randrange(1, 256)
        path.write_bytes(changed)
        caplog.clear()
        if name == "state.json" and _reads_the_same(path, whole):
            continue
        assert loader.find(run_dir).name == "step_1"
        (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert message.startswith(f"checkpoint {path.parent} is damaged and passed over: ")
        with pytest.raises(RunError, match="is damaged: "):
            loader.find(run_dir, step=2)
        tensors = tensors_of(7)
        with pytest.raises(RunError, match=r"checkpoint .* cannot be loaded: "):
            loader.load(path.parent, tensors)
        assert torch.equal(tensors["model.weight"].detach(), torch.full((5, 3), 7.0))
    path.write_bytes(whole)
    assert loader.find(run_dir).name == "step_2"


def _reads_the_same(path: Path, whole: bytes) -> bool:
    """One kind of white space in place of another."""
    try:
        state = read_state(path.parent)
    except RunError:
        return False
    return state == {"value": 2, "skips": [[1, 2]], "note": "é"} and path.read_bytes().split() == whole.split()


def test_what_is_found_is_read_once(
    run_dir: Path, make_checkpointer: Any, tensors_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`load` trusts what `find` has just checked, and nothing else."""
    read: list[str] = []

    def counting(path: Path) -> str:
        read.append(path.name)
        return checksum(path)

    monkeypatch.setattr("trainer.checkpoint.manifest.checksum", counting)
    loader = make_checkpointer()
    path = loader.find(run_dir)
    loader.load(path, tensors_of(0))
    assert read.count("__0_0.distcp") == 1
    loader.load(path, tensors_of(0))
    assert read.count("__0_0.distcp") == 2


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_plain_files(run_dir: Path, tmp_path: Path, name: str, kind: str) -> None:
    """A link may lead out of the folder; reading a pipe would hang."""
    path = run_dir / "checkpoints" / "step_2" / name
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    said: list[str] = []
    done = threading.Thread(target=lambda: find_checkpoint(run_dir, None, said.append), daemon=True)
    done.start()
    done.join(60)
    assert not done.is_alive()
    assert said == [f"checkpoint {path.parent} is damaged and passed over: refused: {name} is not a plain file"]


@pytest.mark.parametrize("name", ["../step_1/__0_0.distcp", "/etc/passwd", "..", "a/b", "__0_0.distcp\n", ""])
def test_names_that_lead_elsewhere(run_dir: Path, forge: Any, name: str) -> None:
    """Listed in state.json, with checksums that fit."""
    from trainer.checkpoint.manifest import FileRecord, file_records, read_manifest

    path = run_dir / "checkpoints" / "step_2"
    records = file_records(read_manifest(path)) | {name: FileRecord(size=1, checksum="0")}
    forge(path, records=records)
    with pytest.raises(ConfigError) as raised:
        find_checkpoint(run_dir, 2, print)
    assert f"refused: state.json lists {name!r}, which is no file of a checkpoint" in str(raised.value)


def test_tensors_in_a_file_that_is_not_listed(run_dir: Path, forge: Any) -> None:
    """It would have no checksum."""
    from trainer.checkpoint.manifest import file_records, read_manifest

    path = run_dir / "checkpoints" / "step_2"
    records = file_records(read_manifest(path))
    del records["__0_0.distcp"]
    forge(path, records=records)
    with pytest.raises(ConfigError, match=r"state\.json does not list __0_0\.distcp, which holds tensors"):
        find_checkpoint(run_dir, 2, print)


def test_a_checkpoint_that_is_a_link_is_fine(run_dir: Path, tmp_path: Path) -> None:
    """People keep old ones on slower disks."""
    path = run_dir / "checkpoints" / "step_2"
    shutil.move(path, tmp_path / "archive")
    path.symlink_to(tmp_path / "archive")
    assert find_checkpoint(run_dir, None, print) == path
    assert read_state(path)["value"] == 2


def test_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block or several: every bit counts, and where it stands."""
    path = tmp_path / "file"
    for block_bytes in (10, 25, 100):
        monkeypatch.setattr("trainer.checkpoint.checksum._BLOCK_BYTES", block_bytes)
        path.write_bytes(bytes(range(25)))
        found = {checksum(path)}
        assert {checksum(path)} == found
        for position in range(25):
            changed = bytearray(range(25))
            changed[position] ^= 128
            path.write_bytes(changed)
            found.add(checksum(path))
        for content in (b"", bytes(range(24)), bytes(range(26)), bytes(25)):
            path.write_bytes(content)
            found.add(checksum(path))
        assert len(found) == 30
