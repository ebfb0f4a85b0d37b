"""The runs of a report as they are now: followed while they go on, with a name, a state and axes to draw over."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from configs.launch import RUN_CONFIG
from trainer.attempts import is_in_use
from trainer.reports.records import Column, MetricsFile, planned_steps, read_config, run_labels
from trainer.run_dir import EVAL_WORKER

State = Literal["running", "finished", "stopped", "failed"]
Axis = Literal["step", "tokens", "hours"]

AXES: tuple[Axis, ...] = ("step", "tokens", "hours")


@dataclass(frozen=True, kw_only=True)
class PlottedRun:
    """A run at one moment."""

    label: str
    config: dict[str, Any]
    metrics: MetricsFile
    state: State

    is_scored: bool
    """An eval-worker is at work on it, so more may come after its end."""

    @property
    def goes_on(self) -> bool:
        """More records may come."""
        return self.state == "running" or self.is_scored

    @property
    def last_step(self) -> int:
        """0 before the first record."""
        return self.metrics.last_step or 0

    @property
    def planned(self) -> int | None:
        return planned_steps(self.config)

    def axes(self) -> "RunAxes":
        return RunAxes(self.metrics)


class RunAxes:
    """What can stand on the x axis in place of the step."""

    def __init__(self, metrics: MetricsFile) -> None:
        self._tokens = metrics.column("progress/num_tokens")
        steps = metrics.column("time/step")
        # What is recorded of a run's time. Starts, and the time between two attempts, are not.
        seconds = steps.values.copy()
        for name in ("time/val", "time/save_ckpt", "time/save_snapshot"):
            extra = metrics.column(name)
            at = np.searchsorted(steps.steps, extra.steps)
            inside = at < len(steps.steps)
            np.add.at(seconds, at[inside], extra.values[inside])
        self._hours = Column(steps=steps.steps, values=np.cumsum(np.nan_to_num(seconds)) / 3600)

    def at(self, axis: Axis, steps: np.ndarray) -> np.ndarray:
        """Position on an axis.

        Args:
            steps: (n,) int64.

        Returns:
            (n,) int64 steps; or float64 tokens read or hours spent up to the end of each step, NaN without a record.
        """
        if axis == "step":
            return steps
        return _at_steps(self._tokens if axis == "tokens" else self._hours, steps)


def _at_steps(column: Column, steps: np.ndarray) -> np.ndarray:
    """A counter at some steps: between two records on the line between them, 0 before the first step."""
    if not len(column.steps):
        return np.full(len(steps), np.nan)
    known, values = column.steps, column.values
    if known[0] == 1:
        known, values = np.append(0, known), np.append(0.0, values)
    return np.interp(steps, known, values)


class FollowedRuns:
    """Runs that are read again and again; each time only what is new."""

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        """
        Raises:
            ConfigError: the config of a run cannot be read.
        """
        self._dirs = list(run_dirs)
        self._labels = run_labels(run_dirs)
        self._configs = [read_config(run_dir) for run_dir in run_dirs]
        self._files = [MetricsFile(run_dir / "metrics.jsonl", _is_number) for run_dir in run_dirs]

    def look(self) -> list[PlottedRun]:
        """All runs as they are now.

        Raises:
            ConfigError: the records of a run cannot be read.
        """
        return [self._look(number) for number in range(len(self._dirs))]

    def _look(self, number: int) -> PlottedRun:
        run_dir, file = self._dirs[number], self._files[number]
        # Asked before reading: a run that ends in between would otherwise be called ended without its last records.
        in_use = is_in_use(run_dir)
        is_scored = is_in_use(run_dir / EVAL_WORKER) is True
        file.update()
        if in_use is not False and (run_dir / RUN_CONFIG).is_file():
            # A resumed run may have another one; while `--clean` empties the folder there is none.
            self._configs[number] = read_config(run_dir)
        config = self._configs[number]
        planned = planned_steps(config)
        finished = planned is not None and file.last_step is not None and file.last_step >= planned
        state: State = "finished" if finished else "stopped"
        if in_use or (in_use is None and not finished):
            state = "running"
        elif not finished and any((run_dir / "logs" / "latest").glob("rank_*.error.json")):
            state = "failed"
        return PlottedRun(label=self._labels[number], config=config, metrics=file, state=state, is_scored=is_scored)

    def close(self) -> None:
        for file in self._files:
            file.close()


def _is_number(name: str) -> bool:
    """Digests are text, and need not be kept."""
    return not name.startswith("digest/")
