"""A job's way into the queue, and whether a run already has one there."""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from configs.errors import ConfigError
from trainer.errors import RunError
from trainer.files import write_whole
from trainer.run_dir import JOB_RECORD

_SQUEUE_SECONDS = 20.0


def submit_command(script: Path) -> list[str]:
    """The command that queues a script and prints the job's id."""
    return ["sbatch", "--parsable", str(script)]


def require_sbatch() -> None:
    """
    Raises:
        ConfigError: this machine cannot submit jobs.
    """
    if shutil.which("sbatch") is None:
        message = (
            "there is no sbatch on this machine's PATH: start the command where jobs are submitted, or leave it out"
        )
        raise ConfigError.one("slurm", message)


def submit(script: Path, run_dir: Path) -> str:
    """Queue the script; gives the job's id and leaves word of it in the run directory.

    Raises:
        RunError: sbatch refuses it, or cannot be started.
    """
    command = submit_command(script)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RunError(f"{shlex.join(command)}: {error.strerror}") from error
    if done.returncode != 0:
        raise RunError(f"{shlex.join(command)}: {(done.stderr or done.stdout).strip() or 'failed without a word'}")
    job_id, _, cluster = done.stdout.strip().partition(";")
    if not job_id:
        raise RunError(f"{shlex.join(command)}: it gave no job id: {done.stderr.strip()}")
    record = {"job_id": job_id, "cluster": cluster or None, "script": str(script)}
    try:
        write_whole(run_dir / JOB_RECORD, (json.dumps(record) + "\n").encode())
    except OSError as error:
        raise RunError(f"job {job_id} is queued, but {run_dir / JOB_RECORD} cannot be written: {error}") from error
    return job_id


def refuse_queued(run_dir: Path, say: Callable[[str], None]) -> None:
    """
    Args:
        say: told that the queue cannot be asked.

    Raises:
        ConfigError: the run has a job that waits or runs. Nothing that it will read may be changed.
    """
    try:
        record = json.loads((run_dir / JOB_RECORD).read_text())
        job_id, cluster = str(record["job_id"]), record["cluster"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError.one("run.name", f"{run_dir / JOB_RECORD} cannot be read: {error}") from error
    if job_id == os.environ.get("SLURM_JOB_ID"):
        return
    squeue = shutil.which("squeue")
    if squeue is None:
        say(f"{run_dir} was submitted as job {job_id}; there is no squeue here to ask whether it still waits or runs")
        return
    where = [] if cluster is None else [f"--clusters={cluster}"]
    command = [squeue, "--noheader", f"--jobs={job_id}", "--format=%T", *where]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SQUEUE_SECONDS)
    except subprocess.TimeoutExpired:
        say(f"{run_dir} was submitted as job {job_id}; squeue does not answer whether it still waits or runs")
        return
    if done.returncode != 0 and "invalid job id" not in done.stderr.lower():  # that is a job that SLURM has forgotten
        say(
            f"{run_dir} was submitted as job {job_id}; squeue cannot tell whether it still waits or runs: {done.stderr}"
        )
        return
    states = [line for line in done.stdout.split("\n") if line.strip() and not line.startswith("CLUSTER:")]
    if states:
        message = f"{run_dir} has job {job_id} in the queue ({states[0]}): wait for it, or end it with scancel {job_id}"
        raise ConfigError.one("run.name", message)
