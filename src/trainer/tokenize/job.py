"""The work as tasks see it, and one task: from its documents to its shards and its completion marker.

A task's files depend on the job and the task alone. A task that was interrupted is done anew from its start; one with a
marker is never done again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loguru import logger
from pydantic import TypeAdapter

from trainer.errors import RunError
from trainer.files import sync, write_whole
from trainer.tokenize.encoder import Encoder
from trainer.tokenize.heldout import HeldoutRule
from trainer.tokenize.readers import Intake, read_task
from trainer.tokenize.sources import Task
from trainer.tokenize.writer import HELDOUT, TRAIN, ShardWriter, TaskCounts


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that the tasks have in common, and the tasks."""

    folder: Path
    """Where tasks write; gets the shards in `train` and `heldout`, the markers in `done`."""

    encoder: Encoder
    heldout: HeldoutRule
    text_key: str
    drop_bad: bool
    shuffle: bool
    seed: int
    tasks: tuple[Task, ...]

    def write(self) -> Path:
        """Write the job for worker processes, and the tokenizer for datatrove; gives the job's file."""
        path = self.folder / "job.json"
        _write(self.encoder_file, self.encoder.json.encode())
        _write(path, _JOB.dump_json(self))
        return path

    @classmethod
    def read(cls, path: Path) -> "Job":
        """What `write` wrote."""
        return _JOB.validate_json(path.read_bytes())

    @property
    def encoder_file(self) -> Path:
        return self.folder / "encoder.json"

    def marker(self, task: int) -> Path:
        """Exists once the task is done; holds what `read_result` gives."""
        return self.folder / "done" / f"{task:05d}.json"


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """What a finished task wrote."""

    counts: TaskCounts

    files: list[str]
    """Paths relative to the job's folder."""


_JOB = TypeAdapter(Job)
_RESULT = TypeAdapter(TaskResult)


@dataclass(frozen=True, kw_only=True)
class TaskProgress:
    """How far a task is."""

    task: int
    source_bytes: int
    documents: int
    tokens: int


def run_task(job: Job, task: Task, on_progress: Callable[[TaskProgress], None]) -> None:
    """Do a task and mark it as done.

    Raises:
        RunError: a row or file cannot be read or written, naming it.
    """
    # datatrove logs every file that it opens.
    logger.disable("datatrove")
    counts = TaskCounts()
    intake = Intake(text_key=job.text_key, drop_bad=job.drop_bad)

    def report() -> None:
        documents = counts.train.documents + counts.heldout.documents
        tokens = counts.train.tokens + counts.heldout.tokens
        on_progress(
            TaskProgress(task=task.number, source_bytes=intake.position, documents=documents, tokens=tokens),
        )

    _remove_leftovers(job, task.number)
    writer = ShardWriter(
        job.encoder, job.encoder_file, job.folder, heldout=job.heldout, shuffle=job.shuffle, seed=job.seed
    )
    files = writer.write(read_task(task, intake), task.number, counts, report)
    counts.empty += intake.empty
    counts.bad += intake.bad
    # A marker must not outlive its files when the machine goes down.
    for file in files:
        sync(job.folder / file)
    _write(job.marker(task.number), _RESULT.dump_json(TaskResult(counts=counts, files=files)))


def read_result(job: Job, task: int) -> TaskResult:
    """What the marker of a finished task says."""
    return _RESULT.validate_json(job.marker(task).read_bytes())


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error


def _remove_leftovers(job: Job, task: int) -> None:
    """Files of an attempt at this task that did not end."""
    for side in (TRAIN, HELDOUT):
        for file in (job.folder / side).glob(f"{task:05d}_*"):
            file.unlink()
