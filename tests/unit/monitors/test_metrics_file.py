"""metrics.jsonl: what is written, and how a resumed run cuts it back."""

import json
import math
from pathlib import Path

import pytest

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


def test_a_file_that_cannot_be_written_ends_the_run_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    with pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl: Is a directory"):
        JsonlMonitor(path).log(1, {"a": 1.0})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_the_error_and_closing_does_not_hide_it() -> None:
    monitor = JsonlMonitor(Path("/dev/full"))
    with pytest.raises(RunError, match="cannot write /dev/full: No space left on device"):
        monitor.log(1, {"a": 1.0})
    monitor.close()
