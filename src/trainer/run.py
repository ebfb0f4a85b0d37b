"""What a worker knows of its run: the folder, the attempt, and whether it was asked to stop.

<run_dir>/configs/sft.json                    resolved config of the newest attempt
<run_dir>/configs/attempt_N/sft.json          that of attempt N
<run_dir>/logs/attempt_N/rank_R.log           everything rank R logged
<run_dir>/logs/attempt_N/rank_R.error.json    why rank R failed, if it did
<run_dir>/logs/attempt_N/rank_R.heartbeat     what rank R is doing
<run_dir>/logs/attempt_N/rank_R.collectives.json   what it shared with other ranks last, where one of them hung
<run_dir>/logs/latest                         link to the newest attempt's folder

An eval-worker has the same in <run_dir>/eval_worker, and its own config in configs/attempt_N/eval_worker.json.
"""

import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from trainer.heartbeat import Heartbeat

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def ignore_stop_signals() -> None:
    """The work is done: what comes now must not make it a failure.

    Python gives signals their first meaning back while it ends, except where they are ignored. In the main thread only.
    """
    for signum in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


class StopSignal:
    """Whether a signal asked this process to stop at the next whole step."""

    def __init__(self) -> None:
        self._requested = False

    @property
    def requested(self) -> bool:
        """SIGTERM, SIGUSR1 or SIGINT arrived. Never goes back. Ranks may see it at different steps."""
        return self._requested

    def install(self) -> None:
        """Take over the signals. In the main thread only."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # Only the flag: the interrupted code may hold the lock of a log stream.
        self._requested = True


@dataclass(frozen=True, kw_only=True)
class Run:
    """One attempt at a run, as its workers see it."""

    dir: Path
    attempt: int
    """0 for the first start in this folder, one more for each later one."""

    stop: StopSignal
    heartbeat: Heartbeat = field(default_factory=Heartbeat)


def attempt_config(run_dir: Path, attempt: int) -> Path:
    return run_dir / "configs" / f"attempt_{attempt}" / "sft.json"


def attempt_logs(run_dir: Path, attempt: int) -> Path:
    return run_dir / "logs" / f"attempt_{attempt}"


def rank_log(run_dir: Path, attempt: int, rank: int) -> Path:
    """Exists from the moment the worker handles signals."""
    return attempt_logs(run_dir, attempt) / f"rank_{rank}.log"


def rank_error(run_dir: Path, attempt: int, rank: int) -> Path:
    return attempt_logs(run_dir, attempt) / f"rank_{rank}.error.json"


def rank_heartbeat(run_dir: Path, attempt: int, rank: int) -> Path:
    return attempt_logs(run_dir, attempt) / f"rank_{rank}.heartbeat"


def rank_collectives(run_dir: Path, attempt: int, rank: int) -> Path:
    return attempt_logs(run_dir, attempt) / f"rank_{rank}.collectives.json"
