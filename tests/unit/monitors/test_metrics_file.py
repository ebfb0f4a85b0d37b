"""metrics.jsonl: what is written, and how a resumed run cuts it back."""

import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest

import trainer.monitors.jsonl as jsonl
from trainer.errors import RunError
from trainer.monitors.jsonl import JsonlMonitor


def written(path: Path) -> list[dict]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_call_is_one_line_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    monitor = JsonlMonitor(path)
    monitor.log(0, {"params/total": 12})
    monitor.log(1, {"loss/mean": 0.1 + 0.2, "digest/rows": "00ff"})
    monitor.log(1, {"val/a/bpb@1k": 1.5})
    # Read while the file is still open: a killed run loses nothing that was logged.
    assert written(path) == [
        {"step": 0, "params/total": 12},
        {"step": 1, "loss/mean": 0.30000000000000004, "digest/rows": "00ff"},
        {"step": 1, "val/a/bpb@1k": 1.5},
    ]


def test_values_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonlMonitor(path).log(3, {"loss/mean": math.nan, "optim/grad_norm": math.inf, "loss/spike": -math.inf, "a": 0.0})
    assert written(path) == [{"step": 3, "loss/mean": None, "optim/grad_norm": None, "loss/spike": None, "a": 0.0}]


def test_cut_back_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = b'{"step": 1, "a": 0.1}\n{"step": 2, "a": 0.2}\n{"step": 2, "val/x": 3}\n'
    path.write_bytes(kept + b'{"step": 3, "a": 0.3}\n{"step": 4, "a": 0.4}\n{"step": 5, "a"')
    monitor = JsonlMonitor(path)
    assert monitor.cut_back(2) == 4
    assert path.read_bytes() == kept
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    monitor.log(3, {"a": 0.5})
    assert path.read_bytes() == kept + b'{"step": 3, "a": 0.5}\n'


def test_a_line_whose_newline_is_missing_counts_as_torn(tmp_path: Path) -> None:
    """Were it kept, the next record would be glued to it."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert JsonlMonitor(path).cut_back(2) == 1
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_damaged_line_is_dropped_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\x00\n[2]\n{"step": 2}\n')
    assert JsonlMonitor(path).cut_back(9) == 2
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: line 2 is no whole record, dropped",
        f"{path}: line 3 is no whole record, dropped",
    ]


def test_cut_back_without_a_file(tmp_path: Path) -> None:
    assert JsonlMonitor(tmp_path / "metrics.jsonl").cut_back(7) is None
    assert list(tmp_path.iterdir()) == []


def test_cut_back_to_zero_keeps_step_zero(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "val/x": 1}\n{"step": 1}\n')
    assert JsonlMonitor(path).cut_back(0) == 1
    assert path.read_bytes() == b'{"step": 0, "val/x": 1}\n'


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_lines_wait_for_a_file_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said once; all lines are there, in order, when it can be written again."""
    caplog.set_level("WARNING", "trainer")
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    monitor = JsonlMonitor(path)
    for step in (1, 2, 3):
        monitor.log(step, {"a": 0.5})
    assert messages(caplog) == [f"cannot write {path}: Is a directory; training goes on, its lines are kept"]
    path.rmdir()
    monitor.log(4, {})
    assert [record["step"] for record in written(path)] == [1, 2, 3, 4]
    assert messages(caplog)[1:] == [f"{path} is written again, with the 4 lines that were kept"]
    monitor.close()
    assert len(caplog.records) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_a_warning_and_what_it_did_not_take_is_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "_MAX_KEPT", 3)
    monitor = JsonlMonitor(Path("/dev/full"))
    for step in range(5):
        monitor.log(step, {"a": 1.0})
    monitor.close()
    assert messages(caplog) == [
        "cannot write /dev/full: No space left on device; training goes on, its lines are kept",
        "5 lines of metrics are not in /dev/full",
    ]


def test_a_deleted_folder_that_comes_back_gets_the_lines_since(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Written to the deleted file, they would be nowhere."""
    folder = tmp_path / "run"
    folder.mkdir()
    monitor = JsonlMonitor(folder / "metrics.jsonl")
    monitor.log(1, {})
    shutil.rmtree(folder)
    monitor.log(2, {})
    monitor.log(3, {})
    folder.mkdir()
    monitor.log(4, {})
    assert [record["step"] for record in written(folder / "metrics.jsonl")] == [2, 3, 4]
    assert [text.partition("metrics.jsonl")[2] for text in messages(caplog)] == [
        " is gone: a new file is begun",
        ": No such file or directory; training goes on, its lines are kept",
        " is written again, with the 3 lines that were kept",
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only files")
def test_a_file_that_became_read_only_is_no_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.touch(mode=0o444)
    monitor = JsonlMonitor(path)
    monitor.log(1, {})
    path.chmod(0o644)
    monitor.log(2, {})
    assert [record["step"] for record in written(path)] == [1, 2]


def test_a_cut_that_fails_is_made_up_before_the_next_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes back to step 2 twice while the disk is full: what the file then has is the newest history."""
    path = tmp_path / "metrics.jsonl"
    monitor = JsonlMonitor(path)
    for step in (1, 2, 3):
        monitor.log(step, {"a": 1})

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        monitor.rewind(2)
        monitor.log(3, {"a": 2})
        monitor.rewind(2)
        monitor.log(3, {"a": 3})
        assert [record["a"] for record in written(path)] == [1, 1, 1]
    monitor.log(4, {"a": 4})
    assert [(record["step"], record["a"]) for record in written(path)] == [(1, 1), (2, 1), (3, 3), (4, 4)]


def test_a_file_that_cannot_be_cut_back_at_the_start_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=r"cannot cut .*metrics\.jsonl back to step 3: Is a directory"):
        JsonlMonitor(tmp_path / "metrics.jsonl").cut_back(3)
