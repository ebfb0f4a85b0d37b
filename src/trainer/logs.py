"""Where a worker's output goes: every rank to its file, rank 0 to the console as well."""

import faulthandler
import logging
import os
import sys
from pathlib import Path
from typing import TextIO

from configs.safe_text import safe
from trainer.progress import ConsoleHandler

_OURS = ("configs", "models", "trainer")


def open_rank_log(path: Path, *, rank: int) -> TextIO:
    """Open this rank's log file; above rank 0 it also takes the process's standard output and error.

    Rank 0 keeps the launcher's streams, so that it knows a terminal when there is one and can draw progress bars.
    """
    stream = path.open("a", buffering=1)
    if rank > 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    # A crash in native code leaves the Python stacks of all threads in the file.
    faulthandler.enable(file=stream)
    return stream


class SafeFormatter(logging.Formatter):
    """Names of files, texts of a config and messages of libraries end up in records: they stay text."""

    def format(self, record: logging.LogRecord) -> str:
        return safe(super().format(record))


def setup_logging(stream: TextIO, *, rank: int, level: str) -> None:
    """Send log records and warnings to the rank's file, and those of rank 0 to the console too.

    Args:
        stream: what open_rank_log gave.
        level: lowest level of our own records; other libraries' are shown from "warning" on.
    """
    lowest = logging.getLevelName(level.upper())
    handlers: list[logging.Handler] = [logging.StreamHandler(stream)]
    handlers[0].setFormatter(SafeFormatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"))
    if rank == 0:
        console = ConsoleHandler()
        console.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
        handlers.append(console)
    root = logging.getLogger()
    root.handlers = handlers
    root.setLevel(max(lowest, logging.WARNING))
    for name in _OURS:
        logging.getLogger(name).setLevel(lowest)
    logging.captureWarnings(True)
