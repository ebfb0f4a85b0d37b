"""Where a worker's output goes: every rank to its file, rank 0 to the console as well."""

import faulthandler
import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from configs.safe_text import safe
from trainer.progress import ConsoleHandler

_OURS = ("configs", "models", "trainer")


@dataclass(frozen=True, kw_only=True)
class RankLog:
    """Where a rank's words go."""

    path: Path
    rank: int
    stream: TextIO
    """The rank's file."""

    console: TextIO
    """The launcher's standard error, for what the file cannot take: its disk may be full."""


def open_rank_log(path: Path, *, rank: int) -> RankLog:
    """Open this rank's log file; above rank 0 it also takes the process's standard output and error.

    Rank 0 keeps the launcher's streams, so that it knows a terminal when there is one and can draw progress bars.
    """
    stream = path.open("a", buffering=1)
    console = sys.stderr
    if rank > 0:
        sys.stdout.flush()
        sys.stderr.flush()
        console = os.fdopen(os.dup(2), "w", buffering=1)
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    # A crash in native code leaves the Python stacks of all threads in the file.
    faulthandler.enable(file=stream)
    return RankLog(path=path, rank=rank, stream=stream, console=console)


class SafeFormatter(logging.Formatter):
    """Names of files, texts of a config and messages of libraries end up in records: they stay text."""

    def format(self, record: logging.LogRecord) -> str:
        return safe(super().format(record))


class _FileHandler(logging.StreamHandler):
    """Records to a rank's file. A file that takes no more is said once on the console; training goes on."""

    def __init__(self, log: RankLog) -> None:
        super().__init__(log.stream)
        self._log = log
        self._said = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging calls it)
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            text = f"rank {self._log.rank}: {self._log.path} cannot be written, lines are lost: {error.strerror}"
            with suppress(OSError):  # a console that is gone
                print(text, file=self._log.console, flush=True)


def setup_logging(log: RankLog, *, level: str) -> None:
    """Send log records and warnings to the rank's file, and those of rank 0 to the console too.

    Args:
        log: what open_rank_log gave.
        level: lowest level of our own records; other libraries' are shown from "warning" on.
    """
    lowest = logging.getLevelName(level.upper())
    handlers: list[logging.Handler] = [_FileHandler(log)]
    handlers[0].setFormatter(SafeFormatter(f"%(asctime)s rank {log.rank} %(levelname)s %(name)s: %(message)s"))
    if log.rank == 0:
        console = ConsoleHandler()
        console.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
        handlers.append(console)
    root = logging.getLogger()
    root.handlers = handlers
    root.setLevel(max(lowest, logging.WARNING))
    for name in _OURS:
        logging.getLogger(name).setLevel(lowest)
    logging.captureWarnings(True)
