"""The faults of the chaos campaign: when one strikes, what it does, and with which exit codes a run may end of it."""

import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chaos_attempt import POLL_SECONDS, Attempt, Process, Role

LOCAL = (
    "launcher killed",
    "worker killed",
    "worker hangs",
    "SIGTERM",
    "disk full",
    "checkpoint truncated",
    "checkpoint removed",
    "checkpoint changed",
)
NODES = (
    "agent killed",
    "node killed",
    "worker killed",
    "worker hangs",
    "SIGTERM",
    "disk full",
    "checkpoint truncated",
    "checkpoint removed",
    "checkpoint changed",
)
MOMENTS = ("starting", "training", "saving")

_STARTING_SECONDS = 8.0
_FILL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a run."""

    kind: str
    moment: str
    """In the start of an attempt; in training, once it has come to `step`; or the first save from there on."""

    step: int
    delay: float
    """Seconds from the start, for a fault in it."""

    choice: int
    """Picks the process or the file, so that a campaign of the same seed strikes alike."""


def draw_faults(
    rng: random.Random, kinds: Sequence[str], count: int, *, total_steps: int, moments: Sequence[str] = MOMENTS
) -> list[Fault]:
    """The faults of one run, in the order of their steps. None so late that the run may have ended before."""
    steps = sorted(rng.randrange(1, int(0.9 * total_steps)) for _ in range(count))
    return [
        Fault(
            kind=rng.choice(kinds),
            moment=rng.choice(moments),
            step=step,
            delay=rng.uniform(0, _STARTING_SECONDS),
            choice=rng.randrange(1 << 30),
        )
        for step in steps
    ]


def wait_for_moment(fault: Fault, attempt: Attempt, seconds: float) -> bool:
    """Until the fault's moment has come, and what it strikes is there. False: the run ended or came to rest before."""
    start = time.monotonic()
    while time.monotonic() < start + seconds:
        match fault.moment:
            case "starting":
                has_come = time.monotonic() > start + fault.delay
            case "training":
                has_come = attempt.has_recorded() and attempt.last_step() >= fault.step
            case _:
                has_come = attempt.has_recorded() and attempt.last_step() >= fault.step and attempt.is_saving()
        if has_come and _targets(fault.kind, attempt):
            return True
        if attempt.exit_code is not None:
            return False
        time.sleep(POLL_SECONDS)
    return False


def _targets(kind: str, attempt: Attempt) -> list[Process]:
    role: Role = "launcher"
    if kind.startswith("worker"):
        role = "worker"
    elif kind in ("agent killed", "node killed"):
        role = "agent"
    return attempt.of(role)


def strike(fault: Fault, attempt: Attempt) -> None:
    """Do it. What is done to a checkpoint follows in `damage`, once the attempt is gone."""
    targets = _targets(fault.kind, attempt)
    target = targets[fault.choice % len(targets)]
    match fault.kind:
        case "worker hangs":
            os.kill(target.pid, signal.SIGSTOP)
        case "SIGTERM":
            os.kill(target.pid, signal.SIGTERM)
        case "node killed":
            for process in attempt.processes():
                if process.node == target.node:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
        case "disk full":
            pass
        case kind if kind.startswith("checkpoint"):
            for process in attempt.processes():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        case _:
            os.kill(target.pid, signal.SIGKILL)


def wait_gone(fault: Fault, attempt: Attempt, disk: Path, seconds: float) -> float | None:
    """As `Attempt.wait_gone`; a full disk stays full meanwhile, whatever the run removes from it."""
    if fault.kind != "disk full":
        return attempt.wait_gone(seconds)
    start = time.monotonic()
    filler = disk / "filler"
    try:
        while time.monotonic() < start + seconds:
            _fill(filler)
            if attempt.is_gone():
                return time.monotonic() - start
            time.sleep(_FILL_SECONDS)
        return None
    finally:
        filler.unlink(missing_ok=True)


def _fill(path: Path) -> None:
    for size in (1 << 20, 1 << 12):
        with suppress(OSError), path.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(size))


def damage(fault: Fault, run_dir: Path) -> str:
    """What happens to the newest checkpoint while nobody looks. Says what was done."""
    folder = run_dir / "checkpoints"
    steps = [int(path.name.removeprefix("step_")) for path in folder.glob("step_*")]
    if not fault.kind.startswith("checkpoint") or not steps:
        return ""
    newest = folder / f"step_{max(steps)}"
    files = sorted(path for path in newest.iterdir() if path.is_file())
    file = files[fault.choice % len(files)]
    place = f"{newest.name}/{file.name}"
    size = file.stat().st_size
    match fault.kind:
        case "checkpoint truncated":
            os.truncate(file, fault.choice % size)
        case "checkpoint changed":
            with file.open("r+b") as opened:
                opened.seek(fault.choice % size)
                byte = opened.read(1)[0]
                opened.seek(fault.choice % size)
                opened.write(bytes([byte ^ 1]))
        case _ if fault.choice % 2:
            shutil.rmtree(newest)
            return newest.name
        case _:
            file.unlink()
    return place


def expected_codes(fault: Fault) -> set[int]:
    """Exit codes of the command after the fault: -9 killed itself, 0 stopped as asked, 143 asked before there were
    workers, 1 failed; 2 where a full disk shows before the start. Of several nodes one is enough to fail."""
    match fault.kind:
        case "launcher killed":
            return {-signal.SIGKILL}
        case "SIGTERM":
            # The script of a job hands it on as SIGUSR1; before Python handles signals it ends the process by itself.
            return {0, 128 + signal.SIGTERM, 128 + signal.SIGUSR1, -signal.SIGTERM}
        case "disk full":
            return {1, 2}
        case kind if kind.startswith("checkpoint"):
            return {-signal.SIGKILL}
        case "agent killed" | "node killed":
            return {1, 128 + signal.SIGKILL}
        case _:
            return {1}
