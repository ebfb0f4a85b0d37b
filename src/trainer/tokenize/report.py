"""What `tokenize` shows: progress while it works, a summary at the end."""

import sys
import time
from collections.abc import Callable

from trainer.progress import ProgressBar, is_terminal
from trainer.tokenize.job import TaskProgress
from trainer.tokenize.writer import SideCounts, TaskCounts

_LINE_SECONDS = 15.0


class WorkProgress:
    """A bar with ETA on a terminal, a line now and then elsewhere."""

    def __init__(
        self, *, description: str, total: int | None, unit: str, done: int, say: Callable[[str], None]
    ) -> None:
        """
        Args:
            total: bytes (of the inputs, shown in kB) or documents; None where it is not known.
            unit: "kB" or "documents".
            done: of these, by an earlier command.
        """
        self._scale = 1000 if unit == "kB" else 1
        self._description, self._unit, self._say = description, unit, say
        self._total = None if total is None else max(1, -(-total // self._scale))
        self._begin = self._done = done // self._scale
        self._bar = ProgressBar(description=f"{description}, {unit}", total=self._total, completed=self._done)
        self._start = self._last = time.monotonic()

    def update(self, done: int, detail: str = "") -> None:
        """Args:
        done: bytes or documents in all.
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
            return f" {self._unit}"
        text = f" of {self._total:,} {self._unit} ({min(1.0, self._done / self._total):.0%})"
        if self._done > self._begin:
            seconds = (now - self._start) * max(0, self._total - self._done) / (self._done - self._begin)
            text += f", ETA {show_seconds(seconds)}"
        return text

    def close(self) -> None:
        self._bar.close()


class TaskTotals:
    """Adds the progress of tasks up."""

    def __init__(self, sizes: dict[int, int], counts: dict[int, TaskCounts]) -> None:
        """
        Args:
            sizes: bytes of the source files of every task.
            counts: of the tasks that are done already.
        """
        self._sizes = sizes
        self._tasks = {
            task: TaskProgress(
                task=task,
                source_bytes=sizes[task],
                documents=count.train.documents + count.heldout.documents,
                tokens=count.train.tokens + count.heldout.tokens,
            )
            for task, count in counts.items()
        }

    def update(self, progress: TaskProgress) -> None:
        self._tasks[progress.task] = progress

    @property
    def source_bytes(self) -> int:
        return sum(task.source_bytes for task in self._tasks.values())

    @property
    def documents(self) -> int:
        return sum(task.documents for task in self._tasks.values())

    @property
    def tokens(self) -> int:
        return sum(task.tokens for task in self._tasks.values())


def summary(counts: TaskCounts, *, text_key: str, num_shards: int, seconds: float) -> list[str]:
    """The lines at the end."""
    lines = [_side_line("train", counts.train), _side_line("heldout", counts.heldout)]
    if counts.empty:
        lines.append(f"dropped {counts.empty:,} documents without text")
    if counts.bad:
        lines.append(f"dropped {counts.bad:,} rows without text at {text_key!r} or that could not be read")
    if counts.control_texts:
        lines.append(f"{counts.control_texts:,} documents spell a control token; it was encoded as text")
    tokens = counts.train.tokens + counts.heldout.tokens
    lines.append(f"{tokens:,} tokens in {num_shards:,} shards; took {show_seconds(seconds)}")
    return lines


def show_seconds(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _side_line(name: str, side: SideCounts) -> str:
    ratio = f", {side.tokens / side.bytes:.4f} tokens/byte" if side.bytes else ""
    return f"{name}: {side.documents:,} documents, {side.tokens:,} tokens, {side.bytes:,} bytes{ratio}"
