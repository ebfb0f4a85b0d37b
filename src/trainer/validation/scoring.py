"""A round of validation: forward passes of fixed shapes over all tasks, with the training weights."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from configs.errors import ConfigError
from models.base import CausalLM
from models.batch import Batch
from trainer.checkpoint.agreement import agree
from trainer.data.collate import collate
from trainer.parallel.mesh import Mesh
from trainer.validation.arrays import write_arrays
from trainer.validation.deal import deal
from trainer.validation.filling import filled_ahead
from trainer.validation.results import RoundResults, add_up, segment_sums
from trainer.validation.set_task import SetTask
from trainer.validation.task import Task
from trainer.validation.windows import KEY, DocumentScores

_PASSES_AHEAD = 4
"""Filled before they are needed; a token takes 24 bytes of host memory."""


class RoundLeftError(Exception):
    """A round was left before all of it was scored."""


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """This rank's part of a forward pass."""

    task: int
    rows: np.ndarray
    """(rows_per_forward,) int64"""


@dataclass(frozen=True, kw_only=True)
class _FilledPass:
    task: int
    batch: Batch
    """On the host."""

    pieces: np.ndarray
    counts: np.ndarray
    """0 on all ranks that share the rows but one, since they are added up."""


class Validation:
    """All that a round scores."""

    def __init__(self, *, tasks: Sequence[Task], mesh: Mesh, pin_memory: bool, arrays_dir: Path | None = None) -> None:
        """Args:
        tasks: what to score.
        mesh: the ranks that share the work.
        pin_memory: batches go through pinned memory.
        arrays_dir: folder for the scores of single documents, in step_N/; None: they are not kept.
        """
        self._tasks = tasks
        self._mesh = mesh
        self._pin_memory = pin_memory
        self._arrays_dir = arrays_dir
        self._deals = [deal(task.costs, rows_per_forward=task.rows_per_forward, dp_size=mesh.dp_size) for task in tasks]

    @property
    def notes(self) -> list[str]:
        """What to tell the user once: what is peculiar about the data, then the size of every task."""
        notes = list(dict.fromkeys(note for task in self._tasks for note in task.notes))
        for task, passes in zip(self._tasks, self._deals, strict=True):
            notes.append(f"{task.name}: {len(passes)} forward passes per rank over {task.content}")
        return notes

    def agree(self) -> None:
        """Make sure that all ranks score the same rows in as many passes. Collective; once, before the first round.

        Raises:
            ConfigError: on every rank, when one of them sees other data.
        """
        own = [(task.name, task.digest, passes.shape) for task, passes in zip(self._tasks, self._deals, strict=True)]
        by_rank = agree(self._mesh, lambda: own)
        for task, seen in zip(self._tasks, zip(*by_rank, strict=True), strict=True):
            others = [rank for rank, one in enumerate(seen) if one != seen[0]]
            if others:
                raise ConfigError.one(
                    KEY, f"{task.name} is not the same on all ranks: rank {others[0]} sees other data than rank 0"
                )

    def run(
        self,
        model: CausalLM,
        on_progress: Callable[[int, int], None] | None = None,
        leave: Callable[[], bool] | None = None,
        *,
        step: int = 0,
    ) -> dict[str, float] | None:
        """Score everything. Collective: every rank calls it with the same weights, and gets the same numbers.

        Args:
            model: in whatever mode it is; it is scored in evaluation mode (no dropout) and left as it was.
            on_progress: called after each forward pass with the passes enqueued so far and in all.
            leave: asked before each forward pass whether to leave the round; must say the same on every rank.
            step: of the weights; it names the folder of the arrays.

        Returns:
            the metrics of all tasks. None if the round was left: numbers over a part of the data would pass for those
            of the whole.

        Raises:
            RunError: a row cannot be read, holds ids beyond the vocabulary, nothing of a task may be scored, or the
                arrays cannot be written.
        """
        try:
            with _evaluating(model):
                results = self.score_own_rows(model, on_progress, leave)
        except RoundLeftError:
            return None
        add_up(results, self._mesh)
        metrics = self.metrics(results)
        if self._arrays_dir is not None and self._mesh.rank == 0:
            self._write_arrays(self._arrays_dir / f"step_{step}", results)
        return metrics

    @torch.no_grad()
    def score_own_rows(
        self,
        model: CausalLM,
        on_progress: Callable[[int, int], None] | None = None,
        leave: Callable[[], bool] | None = None,
    ) -> list[np.ndarray]:
        """The results of this rank's pieces, (num_pieces, NUM_RESULTS) float64 for each task; 0 where they are another
        rank's. Of rows that ranks share, each has the results of its own positions.

        Raises:
            RoundLeftError: `leave` said so.
            RunError: see `run`.
        """
        results = RoundResults([task.num_pieces for task in self._tasks])
        num_passes = sum(map(len, self._deals))
        with closing(filled_ahead(self._fill, self._own_passes(), ahead=_PASSES_AHEAD)) as passes:
            for done, filled in enumerate(passes, 1):
                if leave is not None and leave():
                    raise RoundLeftError
                task = self._tasks[filled.task]
                batch = filled.batch.to(self._mesh.device)
                output = model(batch, greedy=True) if task.greedy else model(batch)
                sums = segment_sums(output, batch, task.text_ids)
                results.collect(filled.task, sums, pieces=filled.pieces, counts=filled.counts)
                if on_progress is not None:
                    on_progress(done, num_passes)
        return results.read()

    def metrics(self, results: Sequence[np.ndarray]) -> dict[str, float]:
        """Those of all tasks, of the results of all ranks: those of `score_own_rows`, added up."""
        metrics: dict[str, float] = {}
        for task, of_task in zip(self._tasks, results, strict=True):
            metrics |= task.metrics(of_task)
        return metrics

    def _write_arrays(self, folder: Path, results: Sequence[np.ndarray]) -> None:
        by_set: dict[str, dict[int, DocumentScores]] = {}
        for task, of_task in zip(self._tasks, results, strict=True):
            if isinstance(task, SetTask):
                by_set.setdefault(task.set.name, {})[task.seq_len] = task.documents(of_task)
        for name, scores in by_set.items():
            write_arrays(folder / f"{name}.parquet", scores)

    def _own_passes(self) -> Generator[_Pass]:
        for number, passes in enumerate(self._deals):
            for ranks in passes:
                yield _Pass(task=number, rows=ranks[self._mesh.dp_rank])

    def _fill(self, one: _Pass) -> _FilledPass:
        filled = self._tasks[one.task].fill(one.rows)
        return _FilledPass(
            task=one.task,
            batch=collate(filled.rows, full_rows=False, pin_memory=self._pin_memory),
            pieces=filled.pieces,
            counts=filled.counts if self._mesh.counts_rows else np.zeros_like(filled.counts),
        )


@contextmanager
def _evaluating(model: CausalLM) -> Generator[None]:
    """Evaluation mode, and afterwards each module's own mode again: frozen parts of a model may keep theirs."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
