"""What `tokenize` counts while it works, and says at the end."""

from trainer.text import show_seconds
from trainer.tokenize.job import TaskProgress
from trainer.tokenize.writer import SideCounts, TaskCounts


class TaskTotals:
    """Adds the progress of tasks up."""

    def __init__(self, sizes: dict[int, int], counts: dict[int, TaskCounts]) -> None:
        """
        Args:
            sizes: bytes of the source files of every task.
            counts: of the tasks that are done already.
        """
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


def _side_line(name: str, side: SideCounts) -> str:
    ratio = f", {side.bytes / side.tokens:.3f} bytes/token" if side.tokens else ""
    return f"{name}: {side.documents:,} documents, {side.tokens:,} tokens, {side.bytes:,} bytes{ratio}"
