"""Scores held-out data with the training weights: rows of fixed shapes, sums on the device, one reduction a round."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from models.base import CausalLM
from models.batch import Batch
from trainer.data.collate import collate
from trainer.parallel.mesh import Mesh
from trainer.validation.task import Task, num_forwards


class RoundLeftError(Exception):
    """A round was left before all of it was scored."""


class Validation:
    """All that a round scores."""

    def __init__(self, *, tasks: Sequence[Task], mesh: Mesh, pin_memory: bool) -> None:
        """Args:
        tasks: what to score.
        mesh: the ranks that share the work.
        pin_memory: batches go through pinned memory.
        """
        self._tasks = tasks
        self._mesh = mesh
        self._pin_memory = pin_memory

    @property
    def notes(self) -> list[str]:
        """What to tell the user once: what is peculiar about the data, then the size of every task."""
        notes = list(dict.fromkeys(note for task in self._tasks for note in task.notes))
        for task in self._tasks:
            notes.append(f"{task.name}: {self._passes(task)} forward passes per rank over {task.content}")
        return notes

    def run(
        self,
        model: CausalLM,
        on_progress: Callable[[int, int], None] | None = None,
        leave: Callable[[], bool] | None = None,
    ) -> dict[str, float] | None:
        """Score everything. Collective: every rank calls it with the same weights, and gets the same numbers.

        Args:
            model: in whatever mode it is; it is scored in evaluation mode (no dropout) and left as it was.
            on_progress: called after each forward pass with the passes enqueued so far and in all.
            leave: asked before each forward pass whether to leave the round; must say the same on every rank.

        Returns:
            the metrics of all tasks. None if the round was left: numbers over a part of the data would pass for those
            of the whole.

        Raises:
            RunError: a row cannot be read, holds ids beyond the vocabulary, or nothing of a task may be scored.
        """
        try:
            with _evaluating(model):
                totals = self.score_own_rows(model, on_progress, leave)
        except RoundLeftError:
            return None
        if self._mesh.world_size > 1:
            dist.all_reduce(totals)
        metrics: dict[str, float] = {}
        # tolist() is the one deliberate host sync of the round.
        for task, sums in zip(self._tasks, totals.tolist(), strict=True):
            metrics |= task.metrics(sums[: task.num_sums])
        return metrics

    @torch.no_grad()
    def score_own_rows(
        self,
        model: CausalLM,
        on_progress: Callable[[int, int], None] | None = None,
        leave: Callable[[], bool] | None = None,
    ) -> Tensor:
        """What this rank adds to each task: (tasks, most sums of a task) float64 on the device, one tensor so that one
        reduction does for all. A task with fewer sums leaves the rest of its row 0.

        Raises:
            RoundLeftError: `leave` said so.
        """
        widest = max(task.num_sums for task in self._tasks)
        totals = torch.zeros(len(self._tasks), widest, dtype=torch.float64, device=self._mesh.device)
        passes = sum(self._passes(task) for task in self._tasks)
        done = 0
        for total, task in zip(totals, self._tasks, strict=True):
            for batch in self._batches(task):
                if leave is not None and leave():
                    raise RoundLeftError
                total[: task.num_sums] += _sums(task, model, batch.to(self._mesh.device))
                done += 1
                if on_progress is not None:
                    on_progress(done, passes)
        return totals

    def _passes(self, task: Task) -> int:
        return num_forwards(task, self._mesh.dp_size)

    def _batches(self, task: Task) -> Iterator[Batch]:
        """This rank's batches, all of one shape; rows past the last one are padding."""
        for forward in range(self._passes(task)):
            first = (forward * self._mesh.dp_size + self._mesh.dp_rank) * task.rows_per_forward
            yield collate(task.fill(first), full_rows=False, pin_memory=self._pin_memory)


def _sums(task: Task, model: CausalLM, batch: Batch) -> Tensor:
    nats = model(batch).nats.double()  # (rows, seq_len)
    return task.sums(nats, batch.labels)


@contextmanager
def _evaluating(model: CausalLM) -> Iterator[None]:
    """Evaluation mode, and afterwards each module's own mode again: frozen parts of a model may keep theirs."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
