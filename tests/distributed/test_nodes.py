"""Runs on two nodes: two agents with tiny workers on this machine, which find each other by the run directory."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs.sft import SFTConfig
from trainer.attempts import is_in_use
from trainer.run_dir import lay_out_job

WORKER = """
import logging, os, signal, sys, time
from pathlib import Path

from configs.errors import ConfigError
from trainer.errors import PeerError, RunError
from trainer.worker import run_worker


def train(config, run):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (run.dir / f"pid_{rank}").write_text(str(os.getpid()))

    def wait_for(condition):
        while not condition():
            time.sleep(0.01)

    wait_for(lambda: all((run.dir / f"pid_{other}").exists() for other in range(world_size)))
    BODY


run_worker(train, sys.argv[1:])
"""


class Agents:
    """The process that forks agents, and what it says of them."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("node_agents.py")
        command = [sys.executable, "-P", str(script)]
        self._process = subprocess.Popen(command, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._said: queue.Queue[list[str]] = queue.Queue()
        self.codes: dict[int, int] = {}
        threading.Thread(target=self._listen, daemon=True).start()
        assert self._next() == ["ready"]

    def start(self, order: dict) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        while len(said := self._next()) == 2:
            self.codes[int(said[0])] = int(said[1])
        return int(said[0])

    def code(self, pid: int, seconds: float = 40) -> int:
        """Exit code of an agent, once it has ended."""
        end = time.monotonic() + seconds
        while pid not in self.codes:
            said = self._next(end - time.monotonic())
            self.codes[int(said[0])] = int(said[1])
        return self.codes[pid]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _next(self, seconds: float = 60) -> list[str]:
        return self._said.get(timeout=max(seconds, 0.01))

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(line.split())


@pytest.fixture(scope="module")
def agents() -> Iterator[Agents]:
    agents = Agents()
    yield agents
    agents.close()


@dataclass(kw_only=True)
class Job:
    """A run of two nodes. Those that were not told to come may come later, or never."""

    agents: Agents
    dir: Path
    command: list[str]
    lost_seconds: float
    pids: dict[int, int]

    def start(self, *nodes: int, restart: int = 0) -> None:
        for node in nodes:
            env = {
                "SLURM_JOB_ID": "7",
                "SLURM_NNODES": "2",
                "SLURM_NTASKS": "2",
                "SLURM_NODEID": str(node),
                "SLURM_RESTART_COUNT": str(restart),
                "SLURMD_NODENAME": f"gpu-{node}",
            }
            order = {"argv": [str(self.dir)], "env": env, "log": str(self.log_file(node)), "command": self.command}
            self.pids[node] = self.agents.start(order | {"lost_seconds": self.lost_seconds})

    def codes(self) -> list[int]:
        """Exit codes of the agents, once they and all workers are gone."""
        codes = [self.agents.code(self.pids[node]) for node in sorted(self.pids)]
        wait_until(lambda: not self.living())
        assert is_in_use(self.dir) is False
        return codes

    def wait_for_workers(self, count: int = 2) -> None:
        wait_until(lambda: len(list(self.dir.glob("pid_*"))) == count and "" not in self.worker_pids().values())

    def worker_pids(self) -> dict[int, str]:
        return {int(path.name[4:]): path.read_text() for path in sorted(self.dir.glob("pid_*"))}

    def kill_worker(self, rank: int) -> None:
        os.kill(int(self.worker_pids()[rank]), signal.SIGKILL)

    def living(self) -> list[str]:
        return [pid for pid in self.worker_pids().values() if exists(pid)]

    def log_file(self, node: int) -> Path:
        return self.dir.parent / f"{self.dir.name}_node_{node}.log"

    def log(self, node: int) -> str:
        return self.log_file(node).read_text()

    def ours(self, node: int) -> list[str]:
        """Lines of an agent's log that torch did not write."""
        return [line for line in self.log(node).splitlines() if line and not line.startswith(("[W", "frame #", "Exc"))]


def exists(pid: str) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(condition: Callable[[], object], seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


@pytest.fixture
def job(tmp_path: Path, agents: Agents) -> Iterator[Callable[..., Job]]:
    """Lays out a job whose workers do this, once all of them are there."""
    jobs = []

    def lay_out(body: str, name: str = "run", *, gpus: int = 1, lost_seconds: float = 20.0, **deployment) -> Job:
        nodes = {"type": "multi_node", "num_nodes": 2, "gpus_per_node": gpus, **deployment}
        values = {"data": {"type": "fake"}, "output_dir": tmp_path, "run": {"name": name}}
        config = SFTConfig.model_validate(values | {"deployment": nodes, "slurm": {}, "max_steps": 5})
        lay_out_job(config, "#!/bin/sh\n", print)
        worker = tmp_path / f"{name}.py"
        worker.write_text(WORKER.replace("BODY", textwrap.indent(textwrap.dedent(body), "    ").strip()))
        command = [sys.executable, "-P", str(worker)]
        job = Job(agents=agents, dir=tmp_path / name, command=command, lost_seconds=lost_seconds, pids={})
        jobs.append(job)
        return job

    yield lay_out
    for job in jobs:
        for pid in job.pids.values():
            if pid not in agents.codes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_two_jobs_of_two_nodes_with_two_workers_each(job: Callable[..., Job]) -> None:
    """Field case R116: two jobs share the machines, port 29500 is occupied, both start."""
    body = """
        import socket

        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        print("env", *(os.environ[name] for name in names), flush=True)
        place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        socket.create_connection(place).close()
        (run.dir / f"port_{rank}").write_text(str(place[1]))
    """
    with socket.socket() as occupier:
        with suppress(OSError):  # taken already is as good
            occupier.bind(("localhost", 29500))
            occupier.listen()
        one, two = job(body, "one", gpus=2), job(body, "two", gpus=2)
        one.start(1, 0)
        two.start(0, 1)
        assert one.codes() == two.codes() == [0, 0]
    for run in (one, two):
        ports = {(run.dir / f"port_{rank}").read_text() for rank in range(4)}
        assert len(ports) == 1 and ports != {"29500"}
        assert not list((run.dir / "slurm").glob("job_*.json"))
    logs = [(one.dir / "logs" / "latest" / f"rank_{rank}.log").read_text() for rank in range(4)]
    assert "env 0 0 4 2 0\n" in one.log(0) and "env" not in one.log(1)
    for rank, line in ((1, "env 1 1 4 2 0"), (2, "env 2 0 4 2 1"), (3, "env 3 1 4 2 1")):
        assert f"{line}\n" in logs[rank]
    assert f"run: {one.dir}, attempt 0, node 1 of 2 (gpu-1, ranks 2 to 3)" in one.log(1)


def test_a_worker_that_dies_ends_both_nodes_which_name_it(job: Callable[..., Job]) -> None:
    run = job("wait_for(lambda: run.stop.requested)\nraise ConnectionError('peer is gone')")
    run.start(0, 1)
    run.wait_for_workers()
    run.kill_worker(1)
    assert run.codes() == [1, 1]
    log = run.dir / "logs" / "attempt_0" / "rank_1.log"
    cause = (
        "rank 1 on node 1 (gpu-1, rank 1) died of SIGKILL (the kernel sends it when memory runs out); the end of its"
    )
    assert run.ours(0)[-2:] == ["node 1 (gpu-1, rank 1) fails: ending the workers of this node", f"{cause} log {log}:"]
    assert run.ours(1)[-1] == f"{cause} log {log}:"


def test_errors_that_can_be_named_come_through_on_all_nodes(job: Callable[..., Job]) -> None:
    run = job("""
        if rank == 1:
            raise ConfigError.one("data.paths", "the shard is gone")
        wait_for(lambda: run.stop.requested)
    """)
    run.start(0, 1)
    assert run.codes() == [2, 2]
    assert run.ours(0)[-1] == run.ours(1)[-1] == "data.paths: the shard is gone"


@pytest.mark.parametrize("node", [0, 1])
def test_kill_9_of_an_agent_ends_its_workers_and_the_other_node(job: Callable[..., Job], node: int) -> None:
    run = job("wait_for(lambda: run.stop.requested)", lost_seconds=3)
    run.start(0, 1)
    run.wait_for_workers()
    os.kill(run.pids[node], signal.SIGKILL)
    codes = run.codes()
    assert codes[node] == -signal.SIGKILL and codes[1 - node] == 1
    last = run.ours(1 - node)[-1]
    if node == 0:
        assert last.startswith("node 0 is lost, its machine or its launcher must be dead: the connection to it broke (")
    else:
        assert last == ("node 1 (gpu-1, rank 1) is lost: no word for 3 s, its machine or its launcher must be dead")


def test_a_signal_at_one_node_stops_all_workers(job: Callable[..., Job]) -> None:
    """Field case R114: a stop request reaches every rank, whichever node got it."""
    run = job("""
        wait_for(lambda: run.stop.requested)
        (run.dir / f"saved_{rank}").touch()
    """)
    run.start(0, 1)
    run.wait_for_workers()
    os.kill(run.pids[1], signal.SIGUSR1)
    assert run.codes() == [0, 0]
    assert sorted(path.name for path in run.dir.glob("saved_*")) == ["saved_0", "saved_1"]
    stopping = "stopping after the work under way (Ctrl-C again ends at once)"
    assert run.ours(0)[-1] == f"SIGUSR1 at node 1 (gpu-1, rank 1): {stopping}"
    assert run.ours(1)[-1] == f"SIGUSR1: {stopping}"


def test_workers_of_one_node_that_do_not_stop_are_killed(job: Callable[..., Job]) -> None:
    run = job("wait_for(lambda: run.stop.requested and rank == 0)", stop_timeout_seconds=1)
    run.start(0, 1)
    run.wait_for_workers()
    os.kill(run.pids[0], signal.SIGTERM)
    assert run.codes() == [128 + signal.SIGTERM] * 2
    assert run.ours(0)[-1] == run.ours(1)[-1] == "workers did not stop within 1 s and were killed"


def test_a_rank_that_hangs_is_named_on_all_nodes(job: Callable[..., Job]) -> None:
    body = """
        from trainer.heartbeat import Phase

        run.heartbeat.beat(Phase.DATA, 3)
        wait_for(lambda: all((run.dir / f"logs/latest/rank_{other}.heartbeat").exists() for other in (0, 1)))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for(lambda: False)
    """
    run = job(body, timeout_seconds=3)
    run.start(0, 1)
    assert run.codes() == [1, 1]
    assert run.ours(0)[-1] == run.ours(1)[-1]
    assert "rank 1 hangs (step 3, waiting for data, " in run.ours(0)[-1]
    assert "rank 0 waits (step 3, waiting for data)" in run.ours(0)[-1]


def test_a_node_that_never_comes_is_named(job: Callable[..., Job]) -> None:
    alone, waiting = job("pass", "alone", timeout_seconds=1), job("pass", "waiting", timeout_seconds=1)
    alone.start(0)
    waiting.start(1)
    assert alone.codes() == waiting.codes() == [1]
    assert alone.ours(0)[-1] == "node 1 of 2 did not come within 1 s"
    assert waiting.ours(1)[-1].startswith("node 0 did not begin within 1 s: there is no ")
    assert not list(alone.dir.glob("pid_*"))


def test_where_node_0_cannot_begin_the_others_know_why(job: Callable[..., Job]) -> None:
    run = job("pass")
    (run.dir / "checkpoints").mkdir()
    run.start(1, 0)
    assert run.codes() == [2, 2]
    assert run.ours(0)[-1] == run.ours(1)[-1] and "is not empty: go on with its run by [resume]" in run.ours(1)[-1]
