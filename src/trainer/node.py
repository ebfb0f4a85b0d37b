"""The agent of one node of a SLURM job: starts the node's workers and ends with the exit code of the whole run.

`srun` starts one on every node, in the job that `sft` submitted. That of node 0 lays out the attempt, as `sft` does
for a local run, and tells the others where to meet. See docs/launch.md.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.command import fail, find_intruder, launch_attempt, say

if TYPE_CHECKING:
    from configs.sft import SFTConfig
    from trainer.attempts import Attempt
    from trainer.peers.store import Meeting

_FREE_SECONDS = 60.0
"""What the processes of a job's turn before get to be gone: SLURM may have lost sight of those of a dead node."""


@dataclass(frozen=True, kw_only=True)
class JobNode:
    """What SLURM says of this process."""

    job_id: str
    restart: int
    """How often the job was queued again."""

    rank: int
    num_nodes: int
    name: str

    @property
    def notice(self) -> str:
        """File name of node 0's notice, of this turn of the job."""
        return f"job_{self.job_id}_{self.restart}.json"


def main() -> None:
    """Entry point: `python -m trainer.node RUN_DIR`."""
    code = run_node(sys.argv[1:], os.environ)
    from trainer.run import ignore_stop_signals

    ignore_stop_signals()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # A connection to a machine that is gone may hold a thread for ever.
    os._exit(code)


def run_node(argv: Sequence[str], environment: Mapping[str, str], worker_command: Sequence[str] | None = None) -> int:
    """Take part in the job that the environment tells of.

    Args:
        argv: the run directory.
        environment: with SLURM's variables.
        worker_command: see `trainer.launch.launch`; None: that of a training.

    Returns:
        exit code as that of `sft`, the same on all nodes.
    """
    intruder = find_intruder(Path(__file__).resolve().parents[1])
    if intruder is not None:
        return fail(intruder, 2)
    from configs.cli import render_error
    from configs.errors import ConfigError
    from trainer.errors import RunError
    from trainer.failures import KilledError, WorkerError
    from trainer.launch import WORKER_COMMAND, ended_by_signals

    try:
        with ended_by_signals():
            return _start(argv, environment, worker_command or WORKER_COMMAND)
    except ConfigError as error:
        return fail(render_error(error, {}), 2)
    except (RunError, WorkerError) as error:
        return fail(str(error), 1)
    except KilledError as error:
        return fail(str(error), 128 + error.signum)
    except KeyboardInterrupt:
        return fail("interrupted", 130)


def _start(argv: Sequence[str], environment: Mapping[str, str], worker_command: Sequence[str]) -> int:
    from configs.launch import MultiNodeConfig

    run_dir, node = _read_arguments(argv), read_node(environment)
    config = read_config(run_dir, restart=node.restart)
    expected = config.deployment.num_nodes if isinstance(config.deployment, MultiNodeConfig) else 1
    if node.num_nodes != expected:
        raise _unfit(f"the job has {node.num_nodes} nodes, and the config asks for {expected}")
    if expected == 1:
        return _run_alone(config, run_dir, environment, worker_command)
    return _run_with_others(config, run_dir, node, environment, worker_command)


def _run_alone(
    config: "SFTConfig", run_dir: Path, environment: Mapping[str, str], worker_command: Sequence[str]
) -> int:
    num_workers = _count_workers(config, 1, environment)
    attempt = _open(config, run_dir)
    say(f"run: {run_dir}, attempt {attempt.number}")
    webhook = config.monitors.webhook
    return launch_attempt(attempt, config.deployment, num_workers, worker_command, webhook=webhook)


def _run_with_others(
    config: "SFTConfig",
    run_dir: Path,
    node: JobNode,
    environment: Mapping[str, str],
    worker_command: Sequence[str],
) -> int:
    from trainer.errors import RunError
    from trainer.peers.nodes import Peers
    from trainer.run_dir import JOB_FOLDER

    notice, patience = run_dir / JOB_FOLDER / node.notice, config.deployment.timeout_seconds
    if node.rank == 0:
        attempt, meeting = _host(config, run_dir, node, notice)
    else:
        attempt, meeting = _join(run_dir, node, notice, patience)
    ranks = _ranks(config, node)
    say(f"run: {run_dir}, attempt {attempt.number}, node {node.rank} of {node.num_nodes} ({node.name}, {ranks})")
    peers = Peers(meeting, node.name, ranks=ranks)
    try:
        peers.start()
        peers.wait_for_all(patience)
        try:
            num_workers = _count_workers(config, node.num_nodes, environment)
        except RunError as error:
            peers.fail(RunError(f"{peers.here}: {error}"))
            raise
        webhook = config.monitors.webhook if node.rank == 0 else None
        return launch_attempt(attempt, config.deployment, num_workers, worker_command, peers, webhook)
    finally:
        if node.rank == 0:
            with suppress(OSError):
                notice.unlink()
        attempt.close()


def _host(config: "SFTConfig", run_dir: Path, node: JobNode, notice: Path) -> "tuple[Attempt, Meeting]":
    """Lay out the attempt, and let the others know. Where that fails, they know it, too."""
    from trainer.attempts import Attempt
    from trainer.errors import RunError
    from trainer.failures import failure_of
    from trainer.peers.notice import put_up, put_up_failure
    from trainer.peers.store import host_meeting

    attempt: Attempt | None = None
    try:
        attempt = _open(config, run_dir)
        meeting = host_meeting(num_nodes=node.num_nodes)
        put_up(notice, meeting, attempt=attempt.number, node_name=node.name)
        return attempt, meeting
    except Exception as error:
        if attempt is not None:
            attempt.close()
        put_up_failure(notice, failure_of(error, time=time.time()))
        if isinstance(error, OSError):
            raise RunError(f"{notice} cannot be written: {error}") from error
        raise


def _join(run_dir: Path, node: JobNode, notice: Path, patience: float) -> "tuple[Attempt, Meeting]":
    from trainer.attempts import Attempt, share
    from trainer.errors import RunError
    from trainer.peers.notice import find_host

    try:
        meeting, number = find_host(notice, node_rank=node.rank, num_nodes=node.num_nodes, seconds=patience, say=say)
        return Attempt(dir=run_dir, number=number, lock=share(run_dir)), meeting
    except OSError as error:
        raise RunError(f"{run_dir} cannot be used: {error}") from error


def _open(config: "SFTConfig", run_dir: Path) -> "Attempt":
    from trainer.attempts import is_in_use
    from trainer.run_dir import open_run_dir

    end = time.monotonic() + _FREE_SECONDS
    while is_in_use(run_dir) and time.monotonic() < end:
        time.sleep(0.5)
    return open_run_dir(config, say)


def _count_workers(config: "SFTConfig", num_nodes: int, environment: Mapping[str, str]) -> int:
    """Workers of this node: its share of the ranks, for which there must be GPUs if the job has any.

    Raises:
        RunError: there are too few.
    """
    import torch

    from trainer.errors import RunError

    ranks = config.ranks
    assert ranks is not None, "SFTConfig.run_faults asks for the number with [slurm]"
    num_workers = ranks // num_nodes
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    given = environment.get("SLURM_GPUS_ON_NODE", "0")
    has_gpus = visible > 0 or (given.isdecimal() and int(given) > 0)
    if has_gpus and visible < num_workers:
        raise RunError(f"{num_workers} GPUs are asked for, torch sees {visible}, and the job has {given} here")
    return num_workers


def _ranks(config: "SFTConfig", node: JobNode) -> str:
    count = (config.ranks or 0) // node.num_nodes
    first = node.rank * count
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"


def _read_arguments(argv: Sequence[str]) -> Path:
    if len(argv) != 1:
        raise _unfit("it takes one argument, the run directory")
    return Path(argv[0])


def read_node(environment: Mapping[str, str]) -> JobNode:
    """This process's place in its job, by SLURM's variables.

    Raises:
        ConfigError: they are missing, or there is more than one process on a node.
    """
    import socket

    try:
        num_nodes = int(environment.get("SLURM_STEP_NUM_NODES") or environment["SLURM_NNODES"])
        num_tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or num_nodes)
        node = JobNode(
            job_id=environment["SLURM_JOB_ID"],
            restart=int(environment.get("SLURM_RESTART_COUNT") or 0),
            rank=int(environment.get("SLURM_NODEID") or environment["SLURM_PROCID"]),
            num_nodes=num_nodes,
            name=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        )
    except KeyError as error:
        raise _unfit(f"{error.args[0]} is not set: srun starts it, in the job that `sft` submits by [slurm]") from error
    except ValueError as error:
        raise _unfit(f"SLURM's variables cannot be read: {error}") from error
    if num_tasks != num_nodes:
        message = f"{num_tasks} were started on {num_nodes} nodes; each starts its workers itself: --ntasks-per-node=1"
        raise _unfit(message)
    return node


def read_config(run_dir: Path, *, restart: int) -> "SFTConfig":
    """The config that was submitted; in a later turn of the job, one that goes on by `resume.auto`.

    Raises:
        ConfigError: there is none that can be read, or the run directory was moved.
    """
    from pydantic import ValidationError

    from configs.checkpoint import ResumeConfig
    from configs.launch import RUN_CONFIG
    from configs.sft import SFTConfig
    from trainer.run_dir import run_dir_of

    path = run_dir / RUN_CONFIG
    try:
        config = SFTConfig.model_validate_json(path.read_text(encoding="utf-8"))
        if restart > 0:
            resume = config.resume or ResumeConfig()
            # The step was the first turn's; of a fork it is in the other run.
            own = {} if resume.dir is not None else {"step": None}
            config = config.model_copy(update={"resume": resume.model_copy(update={"auto": True, **own})})
            config = SFTConfig.model_validate_json(config.model_dump_json())
    except (OSError, ValidationError) as error:
        raise _unfit(f"{path} cannot be used: {error}") from error
    if config.run.name is None or run_dir_of(config).resolve() != run_dir.resolve():
        raise _unfit(f"{path} is the config of another directory ({config.output_dir / (config.run.name or '')})")
    return config


def _unfit(message: str) -> Exception:
    from configs.errors import ConfigError

    return ConfigError.one("trainer.node", message)


if __name__ == "__main__":
    main()
