"""The chaos campaign of benchmarks/chaos.py: its parts, and a short one."""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def faults() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("chaos_faults")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture
def attempts(faults: ModuleType) -> ModuleType:
    return sys.modules["chaos_attempt"]


def test_the_same_seed_strikes_alike(faults: ModuleType) -> None:
    drawn = [faults.draw_faults(random.Random(5), faults.LOCAL, 40, total_steps=200) for _ in range(2)]
    assert drawn[0] == drawn[1]
    steps = [fault.step for fault in drawn[0]]
    assert steps == sorted(steps) and max(steps) < 180
    assert {fault.kind for fault in drawn[0]} == set(faults.LOCAL)


def test_all_processes_of_an_attempt_are_found_also_stopped_ones(attempts: ModuleType, tmp_path: Path) -> None:
    """And those whose parent is gone. None of them is of another attempt."""
    script = "sleep 50 & (sleep 50 &); wait; true"
    kwargs = {"run_dir": tmp_path, "env": {}}
    attempt = attempts.Attempt(["bash", "-c", script], name="first_of_a_test", log=tmp_path / "a", **kwargs)
    other = attempts.Attempt(["sleep", "50"], name="second_of_a_test", log=tmp_path / "b", **kwargs)
    try:
        sleepers: list = []
        while len(sleepers) < 2:
            assert attempt.exit_code is None
            sleepers = [process for process in attempt.processes() if process.command == "sleep 50"]
        os.kill(sleepers[0].pid, signal.SIGSTOP)
        assert [process.command for process in other.processes()] == ["sleep 50"]
        assert attempt.wait_gone(0.1) is None
        assert attempt.of("launcher")[0].command == f"bash -c {script}"
        attempt.kill()
        assert attempt.is_gone() and attempt.exit_code == -9
        assert not other.is_gone()
    finally:
        attempt.kill()
        other.kill()


@pytest.mark.parametrize("kind", ["checkpoint truncated", "checkpoint changed", "checkpoint removed"])
def test_only_the_newest_checkpoint_is_damaged(faults: ModuleType, tmp_path: Path, kind: str) -> None:
    for step in (8, 10):
        folder = tmp_path / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_bytes(bytes(100))

    def content(step: int) -> bytes | None:
        path = tmp_path / "checkpoints" / f"step_{step}" / "state.json"
        return path.read_bytes() if path.exists() else None

    fault = faults.Fault(kind=kind, moment="saving", step=9, delay=0.0, choice=42)
    assert faults.damage(fault, tmp_path).startswith("step_10")
    assert content(8) == bytes(100)
    changed = {
        "checkpoint truncated": bytes(42),
        "checkpoint changed": bytes(42) + b"\1" + bytes(57),
        "checkpoint removed": None,
    }
    assert content(10) == changed[kind]


def test_what_an_earlier_attempt_recorded_does_not_count(attempts: ModuleType, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 150}\n')
    attempt = attempts.Attempt(["sleep", "50"], name="third_of_a_test", run_dir=tmp_path, log=tmp_path / "a", env={})
    try:
        assert attempt.last_step() == 150 and not attempt.has_recorded()
        metrics.write_text('{"step": 150}\n{"step": 151}\n')
        assert attempt.last_step() == 151 and attempt.has_recorded()
    finally:
        attempt.kill()


def test_the_last_step_is_that_of_the_last_whole_line(attempts: ModuleType, tmp_path: Path) -> None:
    assert attempts.last_step(tmp_path) == -1
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3')
    assert attempts.last_step(tmp_path) == 2


@pytest.mark.skipif("ONELOOP_SLOW" not in os.environ, reason="slow: set ONELOOP_SLOW=1")
@pytest.mark.parametrize("way", ["local", "nodes"])
def test_a_short_campaign(tmp_path: Path, way: str) -> None:
    out = tmp_path / "chaos.json"
    command = [sys.executable, "benchmarks/chaos.py", "--faults", "3", "--seed", "2", "--ways", way, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["faults"], result["wrong"], result["unequal"]) == (3, [], [])
    assert result["longest_seconds_to_end"] < 60


def test_a_campaign_notices_what_is_wrong(faults: ModuleType) -> None:
    """Whatever ends a run after a fault in another way than it should is written down with the fault."""
    chaos = importlib.import_module("chaos")
    fault = faults.Fault(kind="SIGTERM", moment="training", step=9, delay=0.0, choice=42)
    assert faults.expected_codes(fault) == {0, 143, 138, -15}
    assert faults.expected_codes(faults.Fault(**(asdict(fault) | {"kind": "worker killed"}))) == {1}
    record = chaos.Record(way="local", run=0, fault=fault, exit_code=1, wrong="unexpected exit code")
    campaign = type("Campaign", (), {"records": [record], "endings": ["tensors differ: ['a']", ""]})()
    found = chaos.summary(campaign, seed=1, seconds=60.0)
    assert [wrong["fault"]["kind"] for wrong in found["wrong"]] == ["SIGTERM"]
    assert (found["unequal"], found["runs"], found["runs_equal_to_undisturbed"]) == (["tensors differ: ['a']"], 2, 1)
