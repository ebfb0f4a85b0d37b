"""The terminal: whether there is one, colours, and progress bars with ETA under the lines of a run."""

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from trainer.text import show_seconds

_COLOUR_CODES = {"red": "31", "green": "32", "yellow": "33"}
_LINE_SECONDS = 15.0


def is_terminal(stream: TextIO) -> bool:
    """Someone watches: a bar may be drawn and redrawn on `stream`."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colours(stream: TextIO) -> bool:
    """`stream` is a terminal and NO_COLOR (https://no-color.org) is unset or empty."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


class ConsoleHandler(logging.Handler):
    """Shows log records on standard output: warnings yellow, errors red, others as `extra={"colour": ...}` says.

    It looks standard output up at every record, because a running bar puts a writer of its own there that prints
    above the bar; a StreamHandler would keep the old one and write through the bar.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            colour = _COLOUR_CODES.get(_colour_of(record))
            if colour is not None and has_colours(sys.stdout):
                line = f"\x1b[{colour}m{line}\x1b[0m"
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        except Exception:
            self.handleError(record)


def _colour_of(record: logging.LogRecord) -> str:
    if record.levelno >= logging.ERROR:
        return "red"
    if record.levelno >= logging.WARNING:
        return "yellow"
    return getattr(record, "colour", "")


class ProgressBar:
    """A bar with count and ETA at the foot of the terminal. What is printed meanwhile appears above it.

    Where standard output is no terminal it draws nothing, and all methods do nothing.
    """

    def __init__(self, *, description: str, total: int | None, completed: int = 0) -> None:
        """
        Args:
            description: what is counted.
            total: count at the end; None where it is not known.
            completed: count at the start; the ETA comes from the speed since then.
        """
        self._progress: Progress | None = None
        self._part: TaskID | None = None
        if not is_terminal(sys.stdout):
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=Console(file=sys.stdout, no_color=not has_colours(sys.stdout)),
            # A thread redraws the bar and takes the interpreter lock from training each time.
            refresh_per_second=2,
            # Steps with a validation or a checkpoint are far slower than the others.
            speed_estimate_period=300,
        )
        self._task = self._progress.add_task(description, total=total, completed=completed)
        self._progress.start()
        # rich hides the cursor; a run that is killed would leave the terminal without one.
        self._progress.console.show_cursor(True)

    def update(self, completed: int) -> None:
        """Set the count."""
        if self._progress is not None:
            self._progress.update(self._task, completed=completed)

    def update_part(self, description: str, completed: int, total: int) -> None:
        """Show how far a long part of the work is, in a second bar that goes away when the part is done."""
        if self._progress is None:
            return
        if self._part is None:
            self._part = self._progress.add_task(description, total=total)
        self._progress.update(self._part, completed=completed)
        if completed == total:
            self._progress.remove_task(self._part)
            self._part = None

    def close(self) -> None:
        """Leave the bar as it is and give standard output back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class WorkProgress:
    """A bar with ETA on a terminal, a line now and then elsewhere."""

    def __init__(
        self, *, description: str, total: int | None, unit: str, say: Callable[[str], None], done: int = 0
    ) -> None:
        """
        Args:
            total: how much there is, None where it is not known; bytes for the units "kB" and "MB".
            unit: of what is shown; "" where the description says it.
            done: how much was done by an earlier command.
        """
        self._scale = {"kB": 10**3, "MB": 10**6}.get(unit, 1)
        self._description, self._unit, self._say = description, unit, say
        self._total = None if total is None else max(1, -(-total // self._scale))
        self._begin = self._done = done // self._scale
        title = f"{description}, {unit}" if unit else description
        self._bar = ProgressBar(description=title, total=self._total, completed=self._done)
        self._start = self._last = time.monotonic()

    def update(self, done: int, detail: str = "") -> None:
        """Args:
        done: how much in all.
        detail: for lines.
        """
        self._done = done // self._scale
        self._bar.update(self._done)
        now = time.monotonic()
        if is_terminal(sys.stdout) or now - self._last < _LINE_SECONDS:
            return
        self._last = now
        self._say(f"{self._description}: {self._done:,}{self._of_total(now)}{detail}")

    def _of_total(self, now: float) -> str:
        if self._total is None:
            return f" {self._unit}".rstrip()
        text = f" of {self._total:,} {self._unit}".rstrip() + f" ({min(1.0, self._done / self._total):.0%})"
        if self._done > self._begin:
            seconds = (now - self._start) * max(0, self._total - self._done) / (self._done - self._begin)
            text += f", ETA {show_seconds(seconds)}"
        return text

    def close(self) -> None:
        self._bar.close()


def _print_line(text: str) -> None:
    print(text, flush=True)


class ProgressBars:
    """Shows how far each thing is that is tracked, one after the other: see WorkProgress."""

    def __init__(self, say: Callable[[str], None] = _print_line) -> None:
        """
        Args:
            say: given the lines where standard output is no terminal.
        """
        self._say = say
        self._what = ""
        self._progress: WorkProgress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def track(self, what: str, done: int, total: int) -> None:
        """Show how much of a thing is done. What was tracked before is over."""
        if self._progress is None or what != self._what:
            self._close()
            self._what = what
            # Whatever is done already was no work of ours: the ETA comes from the speed since now.
            self._progress = WorkProgress(description=what, total=total, unit="", say=self._say, done=done)
        self._progress.update(done)

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None
