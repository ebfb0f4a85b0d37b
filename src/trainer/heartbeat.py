"""What a rank is doing: a small file beside its log, written over at every change of phase.

Nothing is synced, and a write that fails is passed over: a heartbeat must not cost a step anything that can be
measured, and its troubles are not the run's. A reader on another machine may see it half a minute late.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_SIZE = 160
"""Bytes of the file: always the same, so that a later line hides all of an earlier one."""


class Phase(StrEnum):
    """What a rank can be doing, in the words of messages."""

    STARTING = "starting"
    LOADING = "loading data and weights"
    FIRST_STEP = "first forward and backward pass, with compilation"
    DATA = "waiting for data"
    FORWARD_BACKWARD = "forward and backward pass"
    DEVICE = "waiting for the device to end the step before"
    OPTIMIZER = "optimizer"
    MONITORS = "recording metrics"
    CHECKPOINT = "checkpoint"
    SNAPSHOT = "snapshot"
    VALIDATION = "validation"
    WAITING_FOR_SNAPSHOT = "waiting for a snapshot"
    ENDING = "waiting for the last checkpoint to be written"
    DONE = "done"
    STOPPED = "stopped on request"


SLOW_PHASES = frozenset(
    {
        Phase.STARTING,
        Phase.LOADING,
        Phase.FIRST_STEP,
        Phase.CHECKPOINT,
        Phase.SNAPSHOT,
        Phase.VALIDATION,
        Phase.ENDING,
        Phase.DONE,
        Phase.STOPPED,
    }
)
"""A rank may stay in these for long without a sign: it imports, reads or writes terabytes, or compiles."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The last sign of a rank."""

    number: int
    """Signs so far: a rank that moves counts on."""

    phase: Phase
    step: int
    """Number of the optimizer step under way, 1 for the first; 0 before there is one."""

    time: float
    """By the clock of the rank's machine, seconds since 1970."""

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}" if self.step else str(self.phase)


class Heartbeat:
    """The writer's side. Without a path, nothing is written."""

    def __init__(self, path: Path | None = None) -> None:
        self._file: int | None = None
        self._number = 0
        self._step = 0
        self.last: Beat | None = None
        if path is not None:
            with suppress(OSError):
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self.beat(Phase.STARTING)

    def beat(self, phase: Phase, step: int | None = None) -> None:
        """Say what begins now.

        Args:
            step: number of the optimizer step under way; None: that of the last sign.
        """
        self._number += 1
        if step is not None:
            self._step = step
        now = time.time()
        self.last = Beat(number=self._number, phase=phase, step=self._step, time=now)
        if self._file is None:
            return
        line = f'{{"number": {self._number}, "step": {self._step}, "phase": "{phase}", "time": {now:.3f}}}'
        try:
            os.pwrite(self._file, line.encode().ljust(_SIZE - 1) + b"\n", 0)
        except OSError:
            # An old sign would say that the rank does not move.
            with suppress(OSError):
                os.ftruncate(self._file, 0)

    def before(self, action: Callable[[], bool], phase: Phase) -> Callable[[], bool]:
        """The action, and a sign before it each time: for units of long work."""

        def signed() -> bool:
            self.beat(phase)
            return action()

        return signed


def read_beat(path: Path) -> Beat | None:
    """The last sign of a rank; None where there is none, or only half of one."""
    try:
        record = json.loads(path.read_bytes())
        return Beat(
            number=record["number"], phase=Phase(record["phase"]), step=record["step"], time=float(record["time"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
