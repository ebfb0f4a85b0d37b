"""The work as tasks see it, and one task: from its documents to its shards and its completion marker.

A task's files depend on the job and the task alone. A task that was interrupted is done anew from its start; one with a
marker is never done again.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from trainer.errors import RunError
from trainer.tokenize.encoder import Encoder
from trainer.tokenize.heldout import HeldoutRule
from trainer.tokenize.readers import Intake, read_task
from trainer.tokenize.sources import HubDataset, SourceFile, Task
from trainer.tokenize.writer import HELDOUT, TRAIN, ShardWriter, SideCounts, TaskCounts


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
        write_whole(self.encoder_file, self.encoder.json.encode())
        values = asdict(self) | {"folder": str(self.folder)}
        return write_whole(self.folder / "job.json", json.dumps(values).encode())

    @classmethod
    def read(cls, path: Path) -> "Job":
        """What `write` wrote."""
        values: dict[str, Any] = json.loads(path.read_bytes())
        encoder = values["encoder"]
        tasks = [
            Task(
                number=task["number"],
                files=tuple(SourceFile(**file) for file in task["files"]),
                hub=HubDataset(**task["hub"]) if task["hub"] else None,
                num_tasks=task["num_tasks"],
            )
            for task in values["tasks"]
        ]
        return cls(
            **values
            | {
                "folder": Path(values["folder"]),
                "encoder": Encoder(**encoder | {"control_tokens": tuple(encoder["control_tokens"])}),
                "heldout": HeldoutRule(**values["heldout"]),
                "tasks": tuple(tasks),
            }
        )

    @property
    def encoder_file(self) -> Path:
        return self.folder / "encoder.json"

    def marker(self, task: int) -> Path:
        """Exists once the task is done; holds what `read_result` gives."""
        return self.folder / "done" / f"{task:05d}.json"

    def intake(self) -> Intake:
        return Intake(text_key=self.text_key, drop_bad=self.drop_bad)


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """What a finished task wrote."""

    counts: TaskCounts

    files: list[str]
    """Paths relative to the job's folder."""


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
    intake = job.intake()

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
    for file in files:
        _sync(job.folder / file)
    write_whole(job.marker(task.number), json.dumps({"counts": asdict(counts), "files": files}).encode())


def read_result(job: Job, task: int) -> TaskResult:
    """What the marker of a finished task says."""
    values = json.loads(job.marker(task).read_bytes())
    counts = values["counts"]
    sides = {side: SideCounts(**counts[side]) for side in (TRAIN, HELDOUT)}
    return TaskResult(counts=TaskCounts(**counts | sides), files=values["files"])


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file that is either there with all its content or not at all.

    Raises:
        RunError: it cannot be written.
    """
    unfinished = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        _sync(unfinished)
        unfinished.replace(path)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def _remove_leftovers(job: Job, task: int) -> None:
    """Files of an attempt at this task that did not end."""
    for side in (TRAIN, HELDOUT):
        for file in (job.folder / side).glob(f"{task:05d}_*"):
            file.unlink()


def _sync(path: Path) -> None:
    """Have it on the disk: a marker must not outlive its files when the machine goes down."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
