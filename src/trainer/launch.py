"""Runs the workers of an attempt on this machine: hands signals on, and ends them all when one fails."""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from configs.errors import ConfigError, Fault
from configs.launch import DeploymentConfig, SingleNodeConfig
from trainer.attempts import Attempt
from trainer.errors import RunError
from trainer.flight_recorder import recorder_environment
from trainer.run import STOP_SIGNALS, attempt_logs, rank_error, rank_log
from trainer.watchdog import Watchdog

WORKER_COMMAND = (sys.executable, "-P", "-m", "trainer.worker")

_TICK_SECONDS = 0.05
_FAILURE_GRACE_SECONDS = 5.0
"""What the other workers get to end by themselves (they were asked to by SIGTERM) after one failed."""

_KILL_PATIENCE_SECONDS = 20.0
"""A killed process that is still there then hangs in the kernel; nothing here can end it."""

_LOG_TAIL_LINES = 20
_LOG_TAIL_BYTES = 1 << 16

_OF_OTHERS = ("peer", "timeout")
"""Kinds of reports that tell of another rank's failure."""

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGKILL)
"""Signals that no peer's failure brings about. SIGABRT is none: NCCL aborts a process whose peer is gone."""


class WorkerError(Exception):
    """A worker ended for a reason that nobody foresaw. The text has its rank, its log and its traceback."""


class KilledError(Exception):
    """A signal ended the run before its workers had stopped by themselves."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


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
) -> None:
    """Run the workers until all have ended. Whatever happens, none is left.

    SIGTERM, SIGUSR1, SIGINT and SIGHUP ask the workers to stop, once; a second SIGINT kills them.

    Args:
        attempt: the run directory, laid out and locked.
        num_workers: processes.
        stop_timeout: seconds that workers have to stop after a signal.
        say: told what happens.
        command: program and arguments of a worker; run directory, attempt and this process's id are appended.
        timeout: seconds without a sign from any worker after which they hang, see `trainer.watchdog`.

    Raises:
        ConfigError, RunError: what the first failing worker raised.
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
    signals = _Signals()
    with _handlers((*STOP_SIGNALS, signal.SIGHUP), signals.handle):
        workers = WorkerGroup((*command, *arguments), num_workers=num_workers, env=env)
        watchdog = Watchdog(attempt.dir, attempt.number, range(num_workers), timeout)
        watch = _Watch(workers, attempt, num_workers, signals, stop_timeout, say, watchdog)
        workers.start()
        try:
            watch.until_end()
        finally:
            workers.kill()  # what a worker started and left behind
    watch.judge()


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

    def handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self.first_time = signum, now
        elif signum == signal.SIGINT and now - self.first_time > 0.5:
            # Sooner it is the same key press, handed on by a parent such as `uv run` too.
            self.again = True


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
        num_workers: int,
        signals: _Signals,
        stop_timeout: float,
        say: Callable[[str], None],
        watchdog: Watchdog,
    ) -> None:
        self._workers = workers
        self._attempt = attempt
        self._ranks = range(num_workers)
        self._signals = signals
        self._stop_timeout = stop_timeout
        self._say = say
        self._watchdog = watchdog
        self._hang = ""
        self._said = False
        self._asked: set[int] = set()
        self._gone: dict[int, float] = {}
        self._kill_time: float | None = None
        self._kill_reason = ""
        self._killed_time: float | None = None

    def until_end(self) -> None:
        """Until every worker is gone.

        Raises:
            KilledError, WorkerError: one cannot be ended.
        """
        while self._workers.is_alive():
            self._workers.wait(_TICK_SECONDS)
            self._heed_signals()
            self._heed_failures()
            self._heed_hang()
            self._kill_when_due()

    def judge(self) -> None:
        """Raise what the first failure asks for, if there was one."""
        exit_codes = self._workers.exit_codes()
        reports = self._reports()
        if self._hang and all(report["kind"] in _OF_OTHERS for report in reports.values()):
            raise WorkerError(self._hang)
        if self._kill_reason and self._signals.first is not None:
            raise KilledError(self._signals.first, self._kill_reason)
        if not exit_codes and not reports:
            return
        first = self._first_failed(exit_codes, reports)
        if first in reports:
            raise self._reported(first, reports[first])
        code = exit_codes[first]
        if self._signals.first is not None and -code in STOP_SIGNALS:
            raise KilledError(self._signals.first, f"rank {first} was ended by a signal before it could stop")
        raise WorkerError(self._died(first, code))

    def _first_failed(self, exit_codes: dict[int, int], reports: dict[int, dict[str, Any]]) -> int:
        """The rank whose failure the others' followed from."""
        last_own = self._killed_time or math.inf
        silent = {
            rank: self._gone[rank]
            for rank, code in exit_codes.items()
            if rank not in reports and self._gone.get(rank, math.inf) < last_own
        }
        # A positive code without a report is a rank that could not write it, on a full disk for one.
        crashed = {rank: time for rank, time in silent.items() if exit_codes[rank] > 0 or -exit_codes[rank] in _CRASHES}
        own = silent | {rank: report["time"] for rank, report in reports.items() if report["kind"] not in _OF_OTHERS}
        # When one process fails, the errors that its peers get may be there before its failure is seen.
        times = (
            crashed
            or own
            or {
                **{rank: self._gone.get(rank, math.inf) for rank in exit_codes},
                **{rank: report["time"] for rank, report in reports.items()},
            }
        )
        return min(times, key=lambda rank: times[rank])

    def _heed_signals(self) -> None:
        signum = self._signals.first
        if signum is None:
            return
        if not self._said:
            self._said = True
            self._say(f"{signal.Signals(signum).name}: stopping after the work under way (Ctrl-C again ends at once)")
        for rank in self._workers.pids():
            # Before its log exists a worker does not handle signals yet, and would die of one.
            if rank not in self._asked and rank_log(self._attempt.dir, self._attempt.number, rank).exists():
                self._asked.add(rank)
                self._workers.send(rank, signal.SIGTERM)
        if self._signals.again:
            self._kill_at(time.time(), "ended at once by a second Ctrl-C")
        elif time.monotonic() > self._signals.first_time + self._stop_timeout:
            self._kill_at(time.time(), f"workers did not stop within {self._stop_timeout:g} s and were killed")

    def _heed_failures(self) -> None:
        gone = self._workers.find_gone()
        self._gone |= dict.fromkeys(gone, time.time())
        if self._kill_time is None and (True in gone.values() or self._reports()):
            self._kill_time = time.time() + _FAILURE_GRACE_SECONDS

    def _heed_hang(self) -> None:
        timed_out = self._kill_time is not None and {r["kind"] for r in self._reports().values()} == {"timeout"}
        if self._hang or self._killed_time is not None or not (timed_out or self._watchdog.is_stuck()):
            return
        still = f"no rank has moved for {self._watchdog.seconds:.0f} s"
        self._say(f"{still}: asking all what they are doing")
        living = {rank: pid for rank, pid in self._workers.pids().items() if rank not in self._gone}
        self._hang = f"{still}: {self._watchdog.examine(living, self._workers.send)}"
        self._kill_time = time.time()

    def _kill_at(self, moment: float, reason: str) -> None:
        if not self._kill_reason:
            self._kill_time, self._kill_reason = moment, reason

    def _kill_when_due(self) -> None:
        now = time.time()
        if self._kill_time is None or now < self._kill_time or not self._workers.pids():
            return
        if self._killed_time is None:
            self._killed_time = now
            self._workers.kill()
        elif now > self._killed_time + _KILL_PATIENCE_SECONDS:
            raise WorkerError(f"killed workers are still there: processes {sorted(self._workers.pids().values())}")

    def _reports(self) -> dict[int, dict[str, Any]]:
        paths = {rank: rank_error(self._attempt.dir, self._attempt.number, rank) for rank in self._ranks}
        return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}

    def _reported(self, rank: int, report: dict[str, Any]) -> Exception:
        match report["kind"]:
            case "config":
                return ConfigError([Fault(**fault) for fault in report["faults"]])
            case "run" | "peer" | "timeout":
                return RunError(report["message"])
            case _:
                return WorkerError(f"rank {rank} failed; its log: {self._log(rank)}\n{report['text'].rstrip()}")

    def _died(self, rank: int, code: int) -> str:
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            how += " (the kernel sends it when memory runs out)"
        elif code == -signal.SIGBUS:
            how += " (a file that is read through a memory map, such as a data shard, was cut short or its disk failed)"
        elif code > 0:
            how += " and could not write why into its folder of logs; the lines above may tell"
        log = self._log(rank)
        tail = _tail(log) if log.exists() else []
        return "\n".join([f"rank {rank} {how}; the end of its log {log}:", *(f"  {line}" for line in tail)])

    def _log(self, rank: int) -> Path:
        return rank_log(self._attempt.dir, self._attempt.number, rank)


def _tail(path: Path) -> list[str]:
    """The last lines of a file of any size."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
        return file.read(_LOG_TAIL_BYTES).decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
