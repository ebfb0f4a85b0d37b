"""A whole job, submitted by the real command and run by the script it wrote, on programs that stand for SLURM."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from trainer.sft import run_sft

JOB = """
[deployment]
type = "multi_node"
num_nodes = 2
gpus_per_node = 1

[slurm]
requeue = true
pre_run_command = "export OMP_NUM_THREADS=1"
"""


def wait_for(condition: Callable[[], bool], job: subprocess.Popen) -> None:
    """Until the condition holds; the job must not end before."""
    end = time.monotonic() + 120
    while not condition():
        assert job.poll() is None and time.monotonic() < end
        time.sleep(0.01)


def worker_pid(run_dir: Path, rank: int) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"trainer.worker" in command and bytes(run_dir) in command and f"RANK={rank}".encode() in environment:
                return int(entry.name)
    raise AssertionError(f"no rank {rank}")


@contextmanager
def started(job_id: str) -> Iterator[subprocess.Popen]:
    job = subprocess.Popen(["run_job", job_id], start_new_session=True)
    try:
        yield job
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)


def test_two_nodes_a_time_limit_and_a_requeue(runner, reference, fake_slurm: Path, monkeypatch, capsys) -> None:
    """Field case R114: the signal before the time limit comes within a step; both nodes stop after the same one, the
    checkpoint is written, the job is queued again and goes on, and the run is that of one process."""
    start, cluster = runner.config("job"), runner.folder / "cluster.toml"
    cluster.write_text(JOB)
    run_dir = runner.folder / "job"
    assert run_sft(["@", str(start), "@", str(cluster)]) == 0
    assert "slurm: job 101 is queued" in capsys.readouterr().out

    job_log, metrics = run_dir / "slurm" / "job_101.log", run_dir / "metrics.jsonl"
    with started("101") as job:
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, job)
        pid = worker_pid(run_dir, 1)
        os.kill(pid, signal.SIGSTOP)  # so that the run cannot end before the signal is there
        job.send_signal(signal.SIGUSR1)
        wait_for(lambda: "the run is asked to stop" in job_log.read_text(), job)
        os.kill(pid, signal.SIGCONT)
        code = job.wait(timeout=180)
    logs = "".join(path.read_text() for path in sorted((run_dir / "slurm").glob("*.log")))
    assert code == 0, logs
    assert "the job is queued again" in job_log.read_text()

    turns = [json.loads((run_dir / "configs" / f"attempt_{n}" / "sft.json").read_text()) for n in (0, 1)]
    assert turns[0]["resume"] is None and turns[1]["resume"]["auto"] is True
    stopped = next(int(line.split("after step ")[1].split()[0]) for line in logs.splitlines() if "stopped on" in line)
    assert 3 <= stopped < 20 and f"checkpoint at step {stopped} is written" in logs
    assert (run_dir / "checkpoints" / f"step_{stopped}").is_dir()
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert sorted(set(steps)) == list(range(21))

    done = type(reference)(dir=run_dir, config=start, returncode=code, output=logs)
    assert done.column("digest/rows") == reference.column("digest/rows")
    assert done.column("loss/mean")[:10] == pytest.approx(reference.column("loss/mean")[:10], rel=1e-6)
    ours, theirs = done.tensors(10), reference.tensors(10)
    for name, tensor in ours.items():
        if name.startswith("model."):
            assert ((tensor - theirs[name]).norm() / theirs[name].norm()).item() < 1e-5, name
    if os.environ.get("ONELOOP_SLOW") == "1":
        undisturbed = runner.run(runner.config("undisturbed"), ranks=2)
        ours, theirs = done.tensors(20), undisturbed.tensors(20)
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
