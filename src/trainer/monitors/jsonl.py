"""`metrics.jsonl`: the full record of a run, one JSON object a line.

It is the history of the weights that the run holds now: when the run goes back to a checkpoint, what was written after
that checkpoint goes too. JSON has no NaN and no infinities, and readers in other languages refuse the words that
Python writes for them, so a value that is not finite becomes null.
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import orjson

from trainer.errors import RunError

logger = logging.getLogger(__name__)

_MAX_STEP = 2**53


class JsonlMonitor:
    """Appends to the file, one flushed line per call, so that a killed run loses one torn line at most."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self.recorded: frozenset[str] = frozenset()
        """Names of the metrics on record for the step of the last `cut_back`."""

    def log(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        """Append {"step": step, ...metrics}."""
        record = {"step": step} | {name: json_value(value) for name, value in metrics.items()}
        line = json.dumps(record, allow_nan=False) + "\n"
        try:
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self._abandon()
            raise RunError(f"cannot write {self._path}: {error.strerror}") from error

    def cut_back(self, step: int) -> int | None:
        """Drop the records of steps after `step`, and a line that a killed run left unfinished.

        Returns:
            the last step that was recorded before the cut; None if none was.
        """
        self.close()
        self.recorded = frozenset()
        if not self._path.exists():
            return None
        shorter = self._path.with_name(f"{self._path.name}.tmp")
        last_step: int | None = None
        try:
            with self._path.open("rb") as old, shorter.open("wb") as new:
                for number, line in enumerate(old, start=1):
                    record = _whole_record(line)
                    if record is None:
                        logger.warning("%s: line %d is no whole record, dropped", self._path, number)
                        continue
                    last_step = record["step"] if last_step is None else max(last_step, record["step"])
                    if record["step"] == step:
                        self.recorded |= record.keys()
                    if record["step"] <= step:
                        new.write(line)
                new.flush()
                os.fsync(new.fileno())
            shorter.replace(self._path)
        except OSError as error:
            raise RunError(f"cannot cut {self._path} back to step {step}: {error.strerror}") from error
        return last_step

    def _abandon(self) -> None:
        """Close the file without what is still in its buffer, which would fail again and hide the first error."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def json_value(value: float | int | str) -> float | int | str | None:
    """The value as JSON can have it: None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _whole_record(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        return parse_record(line)
    except ValueError:
        return None


def parse_record(line: bytes) -> dict[str, Any]:
    """A line of the file; `step` is there and a whole number.

    Raises:
        ValueError: it is no record; the message says why.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"is damaged: {error.msg} (column {error.colno})") from error
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < _MAX_STEP:
        raise ValueError('is no record of metrics: it has no whole number as "step"')
    return record
