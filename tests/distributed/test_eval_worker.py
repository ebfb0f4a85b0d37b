"""A training and its eval-worker through the real commands: they share a run directory and nothing else."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).with_name("eval-worker"))


@contextmanager
def eval_worker(run_dir: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """The command, in a process group of its own; killed at the end if it is still there."""
    process = subprocess.Popen(
        [COMMAND, "--run-dir", str(run_dir), "--poll-seconds", "0.1", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_a_worker_on_two_ranks_scores_as_the_training_does(runner) -> None:
    """The worker is started first and waits for the run. What it finds is what the training itself finds at the same
    steps, to the rounding of other ranks, and it ends by itself."""
    with eval_worker(runner.folder / "beside", "--deployment.num-train-gpus", "2") as worker:
        run = runner.run(runner.config("beside", steps=8, interval=4), "--eval-snapshots.interval", "2")
        output, _ = worker.communicate(timeout=120)
    assert worker.returncode == 0, output
    assert "there is none yet" in output and "done: the last snapshot of the training is scored" in output
    assert "scored by this worker: 4" in output

    records = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    late = {record["step"]: record for record in records if "time/eval" in record}
    own = {record["step"]: record for record in records if "time/val" in record}
    assert sorted(late) == [2, 4, 6, 8] and sorted(own) == [4, 8]
    names = {name for name in own[4] if name.startswith("val/")}
    assert len(names) == 6
    for step, record in late.items():
        assert {name for name in record if name not in ("step", "time/eval")} == names
        if step in own:
            assert [record[name] for name in sorted(names)] == pytest.approx(
                [own[step][name] for name in sorted(names)], rel=1e-6
            )
    assert [path.name for path in (run.dir / "eval_snapshots").iterdir()] == ["final.json"]
    logs = run.dir / "eval_worker" / "logs" / "latest"
    assert sorted(path.name for path in logs.glob("*.log")) == ["rank_0.log", "rank_1.log"]
