"""metrics.jsonl with two writers: a training, and what scores its weights later."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import trainer.monitors.jsonl as jsonl
from configs.sft import SFTConfig
from trainer.errors import RunError
from trainer.locks import try_lock
from trainer.monitors import open_eval_monitors
from trainer.monitors.jsonl import JsonlMonitor, append_late

LONG = {f"val/set_{number}/bpb@2k": 0.123456789 for number in range(1000)}
"""More than a buffer or a pipe takes at once."""


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_of_both_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    monitor = JsonlMonitor(path, shared=True)

    def train() -> None:
        for step in range(200):
            monitor.log(step, LONG)

    training = threading.Thread(target=train)
    training.start()
    for step in range(1000, 1200):
        assert append_late(path, step, LONG)
    training.join()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(record["step"] for record in found) == [*range(200), *range(1000, 1200)]
    assert all(record == LONG | {"step": record["step"]} for record in found)


def test_a_late_line_stays_when_the_training_cuts_back_behind_it_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    monitor = JsonlMonitor(path)
    for step in (1, 2, 3, 4):
        monitor.log(step, {"loss/mean": 1.0})
    append_late(path, 2, {"val/a/bpb@1k": 2.5, "time/eval": 1.0})
    append_late(path, 4, {"val/a/bpb@1k": 2.25})
    assert monitor.cut_back(2) == 4
    assert steps(path) == [1, 2, 2]
    assert monitor.recorded == {"step", "loss/mean", "val/a/bpb@1k", "time/eval"}


def test_a_line_goes_to_the_file_that_is_there_when_the_lock_is_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training cuts back, which puts another file there, between the opening of the old one and its lock."""
    path = tmp_path / "metrics.jsonl"
    monitor = JsonlMonitor(path)
    for step in (1, 2):
        monitor.log(step, {})
    real, opened = jsonl._open, []

    def open_then_cut(at: Path) -> int:
        opened.append(real(at))
        if len(opened) == 1:
            monitor.cut_back(1)
        return opened[-1]

    monkeypatch.setattr(jsonl, "_open", open_then_cut)
    assert append_late(path, 1, {"val/x": 3.0})
    assert len(opened) == 2 and steps(path) == [1, 1]


def test_a_result_that_no_longer_holds_is_not_written(tmp_path: Path) -> None:
    """Asked under the lock: while the answer is found nobody can cut the file back."""
    path = tmp_path / "metrics.jsonl"
    JsonlMonitor(path).log(1, {})

    def still_holds() -> bool:
        with path.open("r+b") as other:
            assert try_lock(other) is False
        return False

    assert append_late(path, 1, {"val/x": 3.0}, still_holds) is False
    assert steps(path) == [1]


@pytest.mark.parametrize("before", [b"", b'{"step": 1}\n'])
def test_what_a_killed_process_left_of_a_line_is_taken_away(tmp_path: Path, before: bytes) -> None:
    """Also more of it than one block, and where nothing else is in the file."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before + b'{"step": 2, "' + b"a" * 200_000)
    append_late(path, 2, {"val/x": 3.0})
    assert path.read_bytes() == before + b'{"step": 2, "val/x": 3.0}\n'


def test_without_locks_an_unfinished_line_is_ended_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be one that is being written."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1')
    monkeypatch.setattr(jsonl, "try_lock", lambda file: None)
    append_late(path, 2, {"val/x": 3.0})
    assert path.read_bytes() == b'{"step": 1\n{"step": 2, "val/x": 3.0}\n'


def test_a_lock_that_a_dead_machine_left_holds_training_up_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "_LOCK_SECONDS", 0.05)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"")
    with path.open("r+b") as dead:
        assert try_lock(dead)
        JsonlMonitor(path, shared=True).log(1, {})
        append_late(path, 2, {})
    assert steps(path) == [1, 2]


@pytest.mark.parametrize("late", [False, True])
def test_a_disk_that_fills_up_within_a_line_leaves_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n')
    real = os.write
    room = [5]

    def write(file: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0], number = 0, min(room[0], len(data))
        return real(file, data[:number])

    monkeypatch.setattr(os, "write", write)
    if late:
        with pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
            append_late(path, 2, {"a": 1.0})
    else:
        JsonlMonitor(path).log(2, {"a": 1.0})
    assert path.read_bytes() == b'{"step": 1}\n'


def test_late_monitors_show_and_record_any_order_of_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainer")
    values: dict[str, Any] = {"data": {"type": "fake"}, "run": {"name": "one"}}
    monitors = open_eval_monitors(SFTConfig.model_validate(values), tmp_path, None)
    assert monitors.log(40, {"val/a/bpb@1k": 2.5, "time/eval": 3.0})
    assert monitors.log(20, {"val/a/bpb@1k": 2.75})
    assert not monitors.log(10, {"val/a/bpb@1k": 3.0}, lambda: False)
    monitors.close()
    assert steps(tmp_path / "metrics.jsonl") == [40, 20]
    assert [record.getMessage() for record in caplog.records] == [
        "step 40 | val a @1k | bpb 2.5000",
        "step 20 | val a @1k | bpb 2.7500",
    ]
