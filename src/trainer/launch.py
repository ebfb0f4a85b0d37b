"""Runs the workers of an attempt on this machine: hands signals on, and ends them all when one fails.

On several nodes every one has a launcher of its own; what they tell each other is in `trainer.peers`.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from configs.errors import ConfigError
from configs.launch import DeploymentConfig, SingleNodeConfig
from trainer.attempts import Attempt
from trainer.failures import ENDED, FOLLOWED, OWN, Failure, KilledError, WorkerError, failure_of
from trainer.flight_recorder import recorder_environment
from trainer.rank_failures import OF_OTHERS, RankEnds, read_reports
from trainer.run import STOP_SIGNALS, attempt_logs, rank_log
from trainer.watchdog import Watchdog

if TYPE_CHECKING:
    from trainer.peers.nodes import Peers

WORKER_COMMAND = (sys.executable, "-P", "-m", "trainer.worker")

_TICK_SECONDS = 0.05
_FAILURE_GRACE_SECONDS = 5.0
"""What the other workers get to end by themselves (they were asked to by SIGTERM) after one failed."""

_KILL_PATIENCE_SECONDS = 20.0
"""A killed process that is still there then hangs in the kernel; nothing here can end it."""


def count_workers(config: DeploymentConfig) -> int:
    """Worker processes on this machine: one per visible GPU, or as many as asked for; on a CPU, one unless asked.

    Raises:
        ConfigError: more than there are GPUs.
    """
    # Seconds to import, which `sft --help` and faults of the config should not take.
    import torch

    asked = config.num_train_gpus if isinstance(config, SingleNodeConfig) else config.gpus_per_node
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible == 0:
        return asked or 1
    if asked is not None and asked > visible:
        raise ConfigError.one("deployment.num_train_gpus", f"{asked} asked for, {visible} visible")
    return asked or visible


def launch(
    attempt: Attempt,
    *,
    num_workers: int,
    stop_timeout: float,
    say: Callable[[str], None],
    command: Sequence[str] = WORKER_COMMAND,
    timeout: float = math.inf,
    peers: "Peers | None" = None,
) -> None:
    """Run the workers of this node until all have ended, those of other nodes too. Whatever happens, none is left.

    SIGTERM, SIGUSR1, SIGINT and SIGHUP ask the workers of all nodes to stop, once; a second SIGINT kills them.

    Args:
        attempt: the run directory, laid out and locked.
        num_workers: processes on this node, as many as on every other one.
        stop_timeout: seconds that workers have to stop after a signal.
        say: told what happens.
        command: program and arguments of a worker; run directory, attempt and this process's id are appended.
        timeout: seconds without a sign from any worker after which they hang, see `trainer.watchdog`.
        peers: the launchers of the other nodes, all of which are there; None: there is only this node.

    Raises:
        ConfigError, RunError: what the first failing worker of all nodes raised.
        WorkerError: it raised something else, died, or hung.
        KilledError: workers were killed because a signal came.
    """
    from trainer.elastic import WorkerGroup

    # Preflight fetched the datasets; workers that asked again could be given another revision. Not HF_HUB_OFFLINE:
    # with it transformers 5.17 refuses cached tokenizers that have no config.json beside them.
    env = {"PYTHONSAFEPATH": "1", "HF_DATASETS_OFFLINE": "1"}
    env |= recorder_environment(attempt_logs(attempt.dir, attempt.number))
    if "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = str(max(1, _num_cores() // num_workers))
    arguments = (str(attempt.dir), str(attempt.number), str(os.getpid()))
    first = 0 if peers is None else peers.meeting.node_rank * num_workers
    ranks = range(first, first + num_workers)
    signals = _Signals()
    with _handlers((*STOP_SIGNALS, signal.SIGHUP), signals.handle):
        meeting = None if peers is None else peers.meeting
        workers = WorkerGroup((*command, *arguments), num_workers=num_workers, env=env, meeting=meeting)
        watchdog = Watchdog(attempt.dir, attempt.number, ranks, timeout)
        failure = _Watch(workers, attempt, ranks, signals, stop_timeout, say, watchdog, peers).run()
    if failure is not None:
        raise failure.error()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Until `launch`, SIGTERM, SIGUSR1 and SIGHUP end this process as they do by default, but say so."""

    def end(signum: int, frame: FrameType | None) -> None:
        # At once: an exception would be raised within some library's import, which may keep it to itself.
        text = f"{signal.Signals(signum).name}: ended before a worker was started\n"
        with suppress(OSError):
            os.write(2, text.encode())
        os._exit(128 + signum)

    with _handlers((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP), end):
        yield


@dataclass(kw_only=True)
class _Signals:
    """Signals that came: the first that asks to stop, and whether Ctrl-C came again."""

    first: int | None = None
    first_time: float = 0.0
    again: bool = False
    origin: str = ""
    """The node that got it, where it was another one."""

    def handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self.first_time = signum, now
        elif signum == signal.SIGINT and now - self.first_time > 0.5:
            # Sooner it is the same key press, handed on by a parent such as `uv run` too.
            self.again = True

    def take(self, signum: int, origin: str) -> None:
        """As if a signal had come that another node got."""
        self.first, self.first_time, self.origin = signum, time.monotonic(), origin


@contextmanager
def _handlers(signums: Sequence[int], handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle these signals so, and as before afterwards."""
    previous = {}
    for signum in signums:
        handler = signal.getsignal(signum)
        if handler is not signal.SIG_IGN:  # nohup, or a shell's background job: it is to stay deaf
            previous[signum] = handler
            signal.signal(signum, handle)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


class _Watch:
    """What the launcher knows of its workers, and what it does about it."""

    def __init__(
        self,
        workers: Any,
        attempt: Attempt,
        ranks: range,
        signals: _Signals,
        stop_timeout: float,
        say: Callable[[str], None],
        watchdog: Watchdog,
        peers: "Peers | None",
    ) -> None:
        self._workers = workers
        self._attempt = attempt
        self._ranks = ranks
        self._signals = signals
        self._stop_timeout = stop_timeout
        self._say = say
        self._watchdog = watchdog
        self._peers = peers
        self._peer_failed = False
        self._has_answered = False
        self._hang = ""
        self._said = False
        self._asked: set[int] = set()
        self._listening: set[int] = set()
        self._gone: dict[int, float] = {}
        self._kill_time: float | None = None
        self._kill_reason = ""
        self._killed_time: float | None = None

    def run(self) -> Failure | None:
        """Start the workers and wait until they are gone, those of other nodes too. Gives why the run failed."""
        try:
            try:
                self._workers.start()
                self._until_end()
            finally:
                self._workers.kill()  # what a worker started and left behind
            failure = self._judge()
        except (KilledError, WorkerError) as error:
            failure = failure_of(error, time=time.time())
        except Exception as error:
            if self._peers is None:
                raise
            # The agent's: its store is gone with node 0.
            failure = failure_of(error, time=time.time(), weight=FOLLOWED)
        return failure if self._peers is None else self._peers.settle(failure, self._while_settling)

    def _until_end(self) -> None:
        """Until every worker is gone.

        Raises:
            KilledError, WorkerError: one cannot be ended.
        """
        while self._workers.is_alive():
            self._workers.wait(_TICK_SECONDS)
            self._note_listening()
            self._heed_peers()
            self._heed_signals()
            self._heed_failures()
            self._heed_hang()
            self._kill_when_due()
            if self._peer_failed and self._killed_time is None and not self._workers.pids() and self._is_due():
                return  # the agent waits at the store for a node that is gone, and starts nothing

    def _judge(self) -> Failure | None:
        """Why this node failed, if it did."""
        exit_codes = self._workers.exit_codes()
        reports = read_reports(self._attempt, self._ranks)
        if self._hang and all(report["kind"] in OF_OTHERS for report in reports.values()):
            return Failure(kind="worker", message=self._hang, time=time.time(), weight=OWN)
        signum = self._signals.first
        if self._kill_reason and signum is not None:
            return Failure(kind="killed", message=self._kill_reason, signum=signum, time=time.time(), weight=ENDED)
        ends = RankEnds(
            attempt=self._attempt,
            exit_codes=exit_codes,
            reports=reports,
            gone=self._gone,
            killed_time=self._killed_time,
            signum=signum,
            node="" if self._peers is None else self._peers.here,
        )
        return ends.first_failure()

    def _while_settling(self) -> Failure | None:
        """What a signal means once this node's workers are gone."""
        signum = self._signals.first
        if self._peers is not None and signum is not None:
            self._peers.tell(stop=signum)
        if not self._signals.again or signum is None:
            return None
        message = "ended at once by a second Ctrl-C"
        return Failure(kind="killed", message=message, signum=signum, time=time.time(), weight=ENDED)

    def _heed_peers(self) -> None:
        """Stop when another node is asked to, and end when another one fails; let them know of this one."""
        if self._peers is None:
            return
        verdict = self._peers.verdict
        if self._signals.first is None and verdict.stop is not None:
            self._signals.take(verdict.stop, verdict.stop_node)
        if self._signals.first is not None:
            self._peers.tell(stop=self._signals.first)
        if verdict.asks and not self._hang and not self._has_answered:
            self._has_answered = True
            self._watchdog.ask(self._living(), self._workers.send)
        if self._kill_time is not None:
            self._peers.tell(failing=True)
        lost = self._peers.lost_host()
        if not self._peer_failed and self._kill_time is None and (verdict.failing or lost is not None):
            self._peer_failed = True
            self._kill_time = time.time() + _FAILURE_GRACE_SECONDS
            self._say(f"{lost.message if lost is not None else verdict.failing}: ending the workers of this node")
        if self._peer_failed:
            self._ask_all()

    def _heed_signals(self) -> None:
        signum = self._signals.first
        if signum is None:
            return
        if not self._said:
            self._said = True
            name = signal.Signals(signum).name + (f" at {self._signals.origin}" if self._signals.origin else "")
            self._say(f"{name}: stopping after the work under way (Ctrl-C again ends at once)")
        self._ask_all()
        if self._signals.again:
            self._kill_at(time.time(), "ended at once by a second Ctrl-C")
        elif time.monotonic() > self._signals.first_time + self._stop_timeout:
            self._kill_at(time.time(), f"workers did not stop within {self._stop_timeout:g} s and were killed")

    def _ask_all(self) -> None:
        """Ask the workers to stop, once each."""
        for rank in self._listening - self._asked:
            self._asked.add(rank)
            self._workers.send(rank, signal.SIGTERM)

    def _note_listening(self) -> None:
        """Before its log exists a worker does not handle signals yet, and would die of one. Logs may be moved later."""
        for rank in self._workers.pids().keys() - self._listening:
            if rank_log(self._attempt.dir, self._attempt.number, rank).exists():
                self._listening.add(rank)

    def _heed_failures(self) -> None:
        gone = self._workers.find_gone()
        self._gone |= dict.fromkeys(gone, time.time())
        if self._kill_time is None and (True in gone.values() or read_reports(self._attempt, self._ranks)):
            self._kill_time = time.time() + _FAILURE_GRACE_SECONDS

    def _heed_hang(self) -> None:
        reports = {} if self._kill_time is None else read_reports(self._attempt, self._ranks)
        timed_out = {report["kind"] for report in reports.values()} == {"timeout"}
        if self._hang or self._killed_time is not None or not (timed_out or self._watchdog.is_stuck()):
            return
        still = f"no rank has moved for {self._watchdog.seconds:.0f} s"
        self._say(f"{still}: asking all what they are doing")
        if self._peers is not None:
            self._peers.tell(asks=True)
        self._hang = f"{still}: {self._watchdog.examine(self._living(), self._workers.send)}"
        self._kill_time = time.time()

    def _living(self) -> dict[int, int]:
        return {rank: pid for rank, pid in self._workers.pids().items() if rank not in self._gone}

    def _kill_at(self, moment: float, reason: str) -> None:
        if not self._kill_reason:
            self._kill_time, self._kill_reason = moment, reason

    def _is_due(self) -> bool:
        return self._kill_time is not None and time.time() >= self._kill_time

    def _kill_when_due(self) -> None:
        if not self._is_due() or not self._workers.pids():
            return
        now = time.time()
        if self._killed_time is None:
            self._killed_time = now
            self._workers.kill()
        elif now > self._killed_time + _KILL_PATIENCE_SECONDS:
            raise WorkerError(f"killed workers are still there: processes {sorted(self._workers.pids().values())}")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
