"""What a run has left to read, its config and `metrics.jsonl`: also while it goes on, and after it was killed.

A file of a million steps is close to a gigabyte, so it is read once and then followed: `MetricsFile.update` reads what
was added. A run that resumes or goes back puts another file in its place; then all is read anew.
"""

import json
import os
import stat
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from configs.errors import ConfigError
from configs.launch import RUN_CONFIG
from trainer.monitors.jsonl import parse_record


@dataclass(frozen=True, kw_only=True)
class Column:
    """One metric over the steps that have it."""

    steps: np.ndarray
    """(n,) int64, rising."""

    values: np.ndarray
    """(n,) float64; NaN where the record has null."""


NO_VALUES = Column(steps=np.empty(0, np.int64), values=np.empty(0))


class _Growing:
    """Values by step as they are read; a later value of a step replaces the earlier."""

    def __init__(self, values: "array[float] | list[str]") -> None:
        self.steps = array("q")
        self.values = values

    def put(self, step: int, value: Any) -> None:
        if self.steps and self.steps[-1] == step:
            self.values[-1] = value
        else:
            self.steps.append(step)
            self.values.append(value)


class MetricsFile:
    """The metrics of a run by name. Several lines of a step are one record: the last value of a name counts."""

    def __init__(self, path: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """
        Args:
            path: need not exist yet.
            wanted: which names to keep.
        """
        self.path = path
        self._wanted = wanted
        self._file: BinaryIO | None = None
        self._forget()

    def _forget(self) -> None:
        self.close()
        self._offset = 0
        self._lines = 0
        self._numbers: dict[str, _Growing] = {}
        self._texts: dict[str, _Growing] = {}
        self.first_step: int | None = None
        """Lowest and highest step on record; None while there is none."""
        self.last_step: int | None = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def update(self) -> None:
        """Read what was added since the last time. A line without its end is left for later: it is being written, or
        the run was killed while writing it.

        Raises:
            ConfigError: the file cannot be read, or a line of it is no record.
        """
        try:
            if self._was_replaced():
                self._forget()
            if self._file is None:
                if not self.path.exists():
                    return
                # Anything but a plain file could make reading wait for ever.
                if not stat.S_ISREG(self.path.stat().st_mode):
                    raise ConfigError.one("runs", f"{self.path} is no plain file")
                self._file = self.path.open("rb")
            self._read_on(self._file)
        except OSError as error:
            raise ConfigError.one("runs", f"{self.path} cannot be read: {error.strerror}") from error

    def _was_replaced(self) -> bool:
        if self._file is None:
            return False
        # The old file is kept open, so that no new one can have its inode number.
        old = os.fstat(self._file.fileno())
        try:
            new = self.path.stat()
        except FileNotFoundError:
            return True
        return (old.st_dev, old.st_ino) != (new.st_dev, new.st_ino) or new.st_size < self._offset

    def _read_on(self, file: BinaryIO) -> None:
        file.seek(self._offset)
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                record = parse_record(line)
            except ValueError as error:
                raise ConfigError.one("runs", f"{self.path}, line {self._lines + 1} {error}") from error
            self._add(record)
            self._lines += 1
            self._offset += len(line)

    def _add(self, record: dict[str, Any]) -> None:
        step = record.pop("step")
        self.first_step = step if self.first_step is None else min(self.first_step, step)
        self.last_step = step if self.last_step is None else max(self.last_step, step)
        for name, value in record.items():
            if (known := self._numbers.get(name)) is not None and not isinstance(value, str | list | dict):
                known.put(step, float("nan") if value is None else value)
            elif not self._wanted(name):
                continue
            elif isinstance(value, str):
                self._texts.setdefault(name, _Growing([])).put(step, value)
            elif value is None or isinstance(value, int | float):
                growing = self._numbers.setdefault(name, _Growing(array("d")))
                growing.put(step, float("nan") if value is None else value)

    @property
    def names(self) -> list[str]:
        """Metrics that are numbers, in the order of their first record."""
        return list(self._numbers)

    @property
    def text_names(self) -> list[str]:
        return list(self._texts)

    def column(self, name: str) -> Column:
        """A metric; empty if there is none of that name."""
        growing = self._numbers.get(name)
        if growing is None:
            return NO_VALUES
        steps, values = np.array(growing.steps, np.int64), np.array(growing.values, np.float64)
        if len(steps) > 1 and not (np.diff(steps) > 0).all():
            # The scores of a snapshot or of an older checkpoint come when training has gone on past its step.
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
            last_of_step = np.append(np.diff(steps) > 0, True)
            steps, values = steps[last_of_step], values[last_of_step]
        return Column(steps=steps, values=values)

    def texts(self, name: str) -> dict[int, str]:
        """A text metric (a digest) by step."""
        growing = self._texts.get(name)
        return {} if growing is None else dict(zip(growing.steps, growing.values, strict=True))  # type: ignore[arg-type]


def read_config(run_dir: Path) -> dict[str, Any]:
    """The resolved config of a run's newest attempt, as plain JSON: that of another version may not parse any more.

    Raises:
        ConfigError: it cannot be read.
    """
    path = run_dir / RUN_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError.one("runs", f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError.one("runs", f"{path} is damaged: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError.one("runs", f"{path} is damaged: it holds no table")
    return config


def planned_steps(config: dict[str, Any]) -> int | None:
    """`max_steps`; 0 of a run that only scores a model, None where the data decides."""
    steps = config.get("max_steps")
    return steps if isinstance(steps, int) else None


def run_labels(run_dirs: Sequence[Path]) -> list[str]:
    """A short name for each run: its folder's, with as many folders above as tell all of them apart."""
    places = [run_dir.resolve() for run_dir in run_dirs]
    labels = [place.name or str(place) for place in places]
    depth = 1
    while len(set(labels)) < len(labels) and depth < max(len(place.parts) for place in places):
        depth += 1
        labels = ["/".join(place.parts[-depth:]) for place in places]
    return labels
