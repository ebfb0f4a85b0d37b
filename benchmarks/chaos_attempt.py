"""One start of a run in the chaos campaign: its processes, whoever started them, and how far it has come."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Role = Literal["launcher", "agent", "worker", "other"]

POLL_SECONDS = 0.005
_MARK = "ONELOOP_CHAOS"


@dataclass(frozen=True, kw_only=True)
class Process:
    """A living process of an attempt."""

    pid: int
    role: Role
    node: str
    """The node that it plays on; empty where the attempt has no nodes."""

    command: str


class Attempt:
    """A command and everything it started, found by a mark in the environment that children inherit."""

    def __init__(self, command: Sequence[str], *, name: str, run_dir: Path, log: Path, env: Mapping[str, str]) -> None:
        """
        Args:
            command: what starts the run.
            name: unlike that of any other attempt on this machine.
            run_dir: of the run.
            log: gets the command's output.
            env: added to the environment.
        """
        self.run_dir = run_dir
        self.log = log
        self._mark = f"{_MARK}={name}".encode()
        self._recorded_before = self._recorded()
        with log.open("wb") as output:
            self._command = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env, _MARK: name, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """Of the command; None while it runs."""
        return self._command.poll()

    def processes(self) -> list[Process]:
        """All that live, stopped ones too; those that have ended and wait to be reaped do not."""
        self._command.poll()
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            with suppress(OSError):  # it ended, or is another user's
                environment = (folder / "environ").read_bytes().split(b"\0")
                if self._mark in environment:
                    found.append(self._describe(int(folder.name), environment))
        return found

    def _describe(self, pid: int, environment: list[bytes]) -> Process:
        words = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        role: Role = "launcher" if pid == self._command.pid else "other"
        # As a word of its own: a shell that was given the command as one text is none.
        if "trainer.worker" in words:
            role = "worker"
        elif "trainer.node" in words:
            role = "agent"
        name = b"SLURMD_NODENAME="
        node = next((part.removeprefix(name).decode() for part in environment if part.startswith(name)), "")
        return Process(pid=pid, role=role, node=node, command=" ".join(words).strip())

    def of(self, role: Role) -> list[Process]:
        return sorted((found for found in self.processes() if found.role == role), key=lambda found: found.pid)

    def last_step(self) -> int:
        """The newest step in metrics.jsonl, -1 before there is one."""
        return last_step(self.run_dir)

    def has_recorded(self) -> bool:
        """It has written to metrics.jsonl; until then that is of the attempts before."""
        return self._recorded() != self._recorded_before

    def _recorded(self) -> tuple[int, int] | None:
        try:
            found = (self.run_dir / "metrics.jsonl").stat()
        except OSError:
            return None
        return found.st_size, found.st_mtime_ns

    def is_saving(self) -> bool:
        """A checkpoint is being written."""
        return any((self.run_dir / "checkpoints").glob(".step_*.tmp"))

    def is_gone(self) -> bool:
        """No process is left."""
        # The environment of one that is dying is gone a little before it is.
        return not self.processes() and self.exit_code is not None

    def wait_gone(self, seconds: float) -> float | None:
        """Until no process is left. Gives the seconds it took, or None where some were left after `seconds`."""
        start = time.monotonic()
        while time.monotonic() < start + seconds:
            if self.is_gone():
                return time.monotonic() - start
            time.sleep(0.05)
        return None

    def kill(self) -> None:
        """End whatever lives, whoever it was that started it."""
        while processes := self.processes():
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.05)
        self._command.wait()

    def tail(self, num_lines: int = 5) -> str:
        """The end of the command's output, and of the nodes' where there are any."""
        logs = [self.log, *sorted((self.run_dir / "slurm").glob("job_*_node_*.log"))]
        return "\n".join(line for path in logs for line in path.read_text(errors="replace").splitlines()[-num_lines:])


def last_step(run_dir: Path) -> int:
    """The newest step in a run's metrics.jsonl, -1 before there is one."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return -1
    for line in reversed(lines):
        with suppress(ValueError):  # half a line
            if line.endswith(b"\n"):
                return json.loads(line)["step"]
    return -1
