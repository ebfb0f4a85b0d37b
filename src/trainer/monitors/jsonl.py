"""`metrics.jsonl`: the full record of a run, one JSON object a line.

It is the history of the weights that the run holds now: when the run goes back to a checkpoint, what was written after
that checkpoint goes too. JSON has no NaN and no infinities, and readers in other languages refuse the words that
Python writes for them, so a value that is not finite becomes null.

Two processes may write: the training, and one that scores what the training left for it. Each line is one write of a
file opened for appending, under a lock that cutting the file back takes too.
"""

import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import orjson

from trainer.errors import RunError
from trainer.locks import is_at, try_lock, unlock

logger = logging.getLogger(__name__)

_MAX_STEP = 2**53

_LOCK_SECONDS = 10.0
"""A line takes far less. A file server may keep the lock of a machine that is gone, and training must not stop there:
after that long it goes on without."""

_MAX_KEPT = 10_000
"""Lines that wait for a file that cannot be written: some 20 MiB. The oldest go first."""


class JsonlMonitor:
    """Appends to the file, one write per call, so that a killed run loses one torn line at most.

    Trouble with the file never stops a run that is under way: it is said once, lines are kept, and written when the
    file can be written again.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        """
        Args:
            shared: an eval-worker may write meanwhile. Its lock costs a file server's answers at every line, which
                others need not wait for.
        """
        self._path = path
        self._shared = shared
        self._file: int | None = None
        self._kept: deque[tuple[int, bytes]] = deque()
        """Steps and lines that are not in the file yet."""

        self._cut_to: int | None = None
        """Step to which the file could not be cut back yet."""

        self._failing = False
        self._num_lost = 0
        self.recorded: frozenset[str] = frozenset()
        """Names of the metrics on record for the step of the last `cut_back`."""

    def log(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        """Append {"step": step, ...metrics}."""
        self._kept.append((step, _line(step, metrics)))
        if len(self._kept) > _MAX_KEPT:
            self._kept.popleft()
            self._num_lost += 1
        self._write_kept()

    def rewind(self, step: int) -> None:
        """Drop the records of steps after `step`; where the file cannot be cut back, later."""
        self._kept = deque((kept, line) for kept, line in self._kept if kept <= step)
        self._cut_to = step if self._cut_to is None else min(step, self._cut_to)
        self._write_kept()

    def cut_back(self, step: int) -> int | None:
        """Drop the records of steps after `step`, and a line that a killed run left unfinished. Before the first line.

        Returns:
            the last step that was recorded before the cut; None if none was.

        Raises:
            RunError: the file cannot be read or written.
        """
        try:
            return self._cut(step)
        except OSError as error:
            raise RunError(f"cannot cut {self._path} back to step {step}: {error.strerror}") from error

    def close(self) -> None:
        """Try once more to write what was kept."""
        if self._failing:
            self._write_kept()
        if self._kept or self._num_lost:
            logger.warning("%d lines of metrics are not in %s", len(self._kept) + self._num_lost, self._path)
        self._close_file()

    def _write_kept(self) -> None:
        try:
            if self._cut_to is not None:
                self._cut(self._cut_to)
                self._cut_to = None
            if self._kept:
                file = self._opened()
                with _alone(file) if self._shared else nullcontext():
                    _append(file, b"".join(line for _, line in self._kept))
        except OSError as error:
            self._close_file()
            if not self._failing:
                reason = error.strerror or error
                logger.warning("cannot write %s: %s; training goes on, its lines are kept", self._path, reason)
            self._failing = True
            return
        if self._failing:
            self._failing = False
            logger.warning("%s is written again, with the %d lines that were kept", self._path, len(self._kept))
        self._kept.clear()

    def _opened(self) -> int:
        """The file, which may have been deleted since the last line: then a new one, or the lines would be lost."""
        if self._file is not None and not is_at(self._file, self._path):
            logger.warning("%s is gone: a new file is begun", self._path)
            self._close_file()
        if self._file is None:
            self._file = _open(self._path)
        return self._file

    def _cut(self, step: int) -> int | None:
        self._close_file()
        self.recorded = frozenset()
        if not self._path.exists():
            return None
        shorter = self._path.with_name(f"{self._path.name}.tmp")
        last_step: int | None = None
        # Whoever has the lock of the old file when its place is taken looks again: see append_late.
        with self._path.open("r+b") as old, _alone(old.fileno()), shorter.open("wb") as new:
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
        return last_step

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None


def append_late(
    path: Path, step: int, metrics: Mapping[str, float | int | str], still_holds: Callable[[], bool] = lambda: True
) -> bool:
    """Append a record to a file that another process may be writing, or cutting back, at the same time.

    Args:
        path: need not exist yet; its folder must.
        step: any; lines of earlier steps may come after those of later ones.
        still_holds: asked when nobody can cut the file back any more before the line is in it: whether the record is
            of the history that the file tells.

    Returns:
        whether it was written.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        while True:
            file = _open(path)
            try:
                with _alone(file) as is_alone:
                    if not is_at(file, path):
                        continue  # it was cut back meanwhile, into a new file
                    if not still_holds():
                        return False
                    _end_last_line(file, may_cut=is_alone)
                    _append(file, _line(step, metrics))
                    return True
            finally:
                os.close(file)
    except OSError as error:
        raise _unwritable(path, error) from error


def _line(step: int, metrics: Mapping[str, float | int | str]) -> bytes:
    record = {"step": step} | {name: json_value(value) for name, value in metrics.items()}
    return (json.dumps(record, allow_nan=False) + "\n").encode()


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _append(file: int, line: bytes) -> None:
    """All of the line or, on a full disk, nothing of it."""
    written = os.write(file, line)
    if written == len(line):
        return
    try:
        while written < len(line):
            written += os.write(file, line[written:])
    except OSError:
        with suppress(OSError):
            os.truncate(file, os.fstat(file).st_size - written)
        raise


def _end_last_line(file: int, *, may_cut: bool) -> None:
    """Take away what a killed process left of a line: the next one would be glued to it.

    Args:
        may_cut: nobody is writing; else it may be a line that is being written, and gets an end instead.
    """
    size = os.fstat(file).st_size
    if size == 0 or os.pread(file, 1, size - 1) == b"\n":
        return
    if not may_cut:
        os.write(file, b"\n")
        return
    end, block = size, b""
    while end > 0 and b"\n" not in block:
        start = max(0, end - (1 << 16))
        block, end = os.pread(file, end - start, start), start
    os.truncate(file, end + block.rfind(b"\n") + 1)


@contextmanager
def _alone(file: int) -> Iterator[bool]:
    """Hold the lock of the open file; whether it was got. Its waiting ends after _LOCK_SECONDS."""
    give_up = time.monotonic() + _LOCK_SECONDS
    while (locked := try_lock(file)) is False and time.monotonic() < give_up:
        time.sleep(0.002)
    try:
        yield locked is True
    finally:
        if locked:
            unlock(file)


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot write {path}: {error.strerror}")


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
