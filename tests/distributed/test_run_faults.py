"""What a run survives, and how it ends when it cannot."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


def wait_for(condition: Callable[[], bool], process, seconds: float = 120) -> None:
    """Poll until `condition` holds; the process must still run then."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "the run does not get on"
        time.sleep(0.002)


def count_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def is_saving(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob(".step_*.tmp"))


@pytest.fixture(scope="module")
def undisturbed(runner):
    return runner.run(runner.config("undisturbed", steps=60, interval=5))


def kill_and_resume(runner, undisturbed, name: str, seed: int, ranks: int = 1) -> None:
    """Kill -9 the launcher once in training and once in saving, resume each time, and compare the end."""
    rng = random.Random(seed)
    config = runner.config(name, steps=60, interval=5)
    resume = runner.folder / "resume.toml"
    resume.write_text("[resume]\n")
    run_dir = runner.folder / name
    arguments = ["@", config, "--deployment.num-train-gpus", str(ranks), "--no-val"]
    last_steps = rng.randint(8, 20), rng.randint(25, 45)
    for in_saving, last_step in zip((rng.random() < 0.5, True), last_steps, strict=True):
        process = runner.popen(*arguments)
        if in_saving:
            wait_for(lambda last_step=last_step: count_steps(run_dir) > last_step and is_saving(run_dir), process)
        else:
            wait_for(lambda last_step=last_step: count_steps(run_dir) > last_step, process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        arguments = ["@", config, "@", resume, "--deployment.num-train-gpus", str(ranks), "--no-val"]
    done = runner.run(config, "@", resume, "--no-val", ranks=ranks)
    assert done.column("step") == list(range(1, 61))
    assert done.column("digest/rows") == undisturbed.column("digest/rows")
    ours, theirs = done.tensors(60), undisturbed.tensors(60)
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kill_9_loses_nothing(runner, undisturbed, seed):
    """Field case R66: at random moments in training and in saving; the final weights are bit-equal."""
    kill_and_resume(runner, undisturbed, f"killed_{seed}", seed)


@pytest.mark.skipif("ONELOOP_SLOW" not in os.environ, reason="slow: set ONELOOP_SLOW=1")
@pytest.mark.parametrize("seed", range(10, 30))
def test_kill_9_twenty_times(runner, undisturbed, seed):
    kill_and_resume(runner, undisturbed, f"killed_{seed}", seed)


def test_sigterm_writes_a_checkpoint_and_the_run_goes_on(runner, undisturbed):
    """Field case R114: both ranks agree on the step, the exit is clean and says so, and nothing is lost."""
    config = runner.config("terminated", steps=60, interval=50)
    process = runner.popen("@", config, "--deployment.num-train-gpus", "2", "--no-val")
    wait_for(lambda: count_steps(runner.folder / "terminated") > 5, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "stopped on request after step" in output
    resume = runner.folder / "resume_terminated.toml"
    resume.write_text("[resume]\n")
    done = runner.run(config, "@", resume, "--no-val", ranks=2)
    assert done.column("digest/rows") == undisturbed.column("digest/rows")
    assert done.column("loss/mean")[:10] == pytest.approx(undisturbed.column("loss/mean")[:10], rel=1e-6)


def test_diverged_run_goes_back_once_and_then_fails(runner):
    """Field case R94: steps that are not finite are skipped and counted; too many in a row end the run with exit 1."""
    config = runner.config("diverged", steps=40, interval=2)
    options = ["--optim.lr", "1e30", "--optim.max-norm", "None", "--nan-guard.max-consecutive", "3", "--no-val"]
    done = runner.run(config, *options, ranks=2, check=False)
    assert done.returncode == 1
    assert "back to step_" in done.output and "were all skipped" in done.output.splitlines()[-1]
    assert "Traceback" not in done.output
    last = done.metrics[max(done.metrics)]
    assert last["optim/skipped_steps"] == 6


def test_ids_beyond_the_vocabulary_end_the_run_with_the_file(runner, tiny_shards):
    """Field case R47: caught on the CPU when the row is read, with shard and offset; exit 1, no traceback."""
    config = runner.config("small_vocabulary")
    done = runner.run(config, "--model.arch.vocab-size", "299", check=False)
    assert done.returncode == 2 and "model.arch" in done.output and "Traceback" not in done.output


def test_missing_shard_index(runner, tiny_shards, tmp_path):
    for path in tiny_shards.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    next(iter(sorted(tmp_path.glob("*.index")))).unlink()
    done = runner.run(runner.config("no_index"), "--data.paths", tmp_path, check=False)
    assert done.returncode == 2
    assert "data.paths" in done.output and ".ds.index" in done.output and "Traceback" not in done.output
    assert not (runner.folder / "no_index" / "metrics.jsonl").exists()
