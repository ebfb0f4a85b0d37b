"""Which rows a step reads: positions in the stream of all epochs, with ranges passed over on purpose."""

import re
from typing import Any

import numpy as np

from configs.errors import ConfigError

_MAX_SHOWN = 80
"""Characters of a value in a message: a checkpoint's state may hold anything."""

_DIGEST = re.compile("[0-9a-f]{32,}")

_MAX_POSITION = 2**62
"""Positions are counted in int64."""


class RowStream:
    """The stream of rows cut into steps of `batch_size`. Its state is a position and the skipped ranges after it."""

    def __init__(self, *, num_rows: int, batch_size: int) -> None:
        """Args:
        num_rows: rows per epoch.
        batch_size: rows per step.
        """
        self._num_rows = num_rows
        self._batch_size = batch_size
        self._origin = (0, 0)
        """A step, and the stream position of its first row: where the run began or was resumed."""
        self._skips: list[tuple[int, int]] = []
        """[start, stop) in stream positions, ascending, apart, after the origin."""

    def position(self, step: int) -> int:
        """Stream position of the first row of a step."""
        return int(self._positions(step, np.zeros(1, np.int64))[0])

    def rows(self, step: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(epochs, indices), each (n,) int64, of the rows at these places (n,) of a step."""
        positions = self._positions(step, places.astype(np.int64))
        return positions // self._num_rows, positions % self._num_rows

    def _positions(self, step: int, places: np.ndarray) -> np.ndarray:
        origin_step, origin_position = self._origin
        positions = origin_position + (step - origin_step) * self._batch_size + places
        for start, stop in self._skips:
            positions = positions + np.where(positions >= start, stop - start, 0)
        return positions

    def skip(self, first_step: int, last_step: int) -> None:
        """Pass over the rows of these steps from now on."""
        if not self._origin[0] <= first_step <= last_step:
            raise ValueError(f"steps {first_step} to {last_step} cannot be skipped")
        last_row = np.array([self._batch_size - 1])
        start, stop = self.position(first_step), int(self._positions(last_step, last_row)[0]) + 1
        inside = [span for span in self._skips if start <= span[0] < stop]
        self._skips = sorted([span for span in self._skips if span not in inside] + [(start, stop)])
        self._merge_neighbours()

    def _merge_neighbours(self) -> None:
        merged: list[tuple[int, int]] = []
        for start, stop in self._skips:
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        self._skips = merged

    def state_dict(self, next_step: int) -> dict[str, Any]:
        epoch, index = divmod(self.position(next_step), self._num_rows)
        return {"epoch": epoch, "index": index, "skips": [list(span) for span in self._skips]}

    def load_state_dict(self, state: dict[str, Any], next_step: int) -> None:
        """Let `next_step` begin at the position of the state, whatever step and batch size it was saved at.

        Ranges skipped so far stay skipped: a run that goes back twice to one checkpoint must not read again what it
        passed over the first time, which the checkpoint cannot know of.

        Raises:
            ConfigError: key "resume": the state is incomplete or damaged.
        """
        missing = {"epoch", "index", "skips"} - state.keys()
        if missing:
            raise ConfigError.one("resume", f"the checkpoint's data state lacks {', '.join(sorted(missing))}")
        try:
            position = int(state["epoch"]) * self._num_rows + int(state["index"])
            skips = [(int(start), int(stop)) for start, stop in state["skips"]]
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError.one("resume", f"the checkpoint's data state is damaged ({error})") from error
        bounds = [0, position, *(bound for span in skips for bound in span)]
        if min(bounds) < 0 or max(bounds) > _MAX_POSITION or any(start >= stop for start, stop in skips):
            raise ConfigError.one("resume", "the checkpoint's data state is damaged (impossible position or skip)")
        self._origin = (next_step, position)
        self._skips = sorted((max(start, position), stop) for start, stop in skips + self._skips if stop > position)
        self._merge_neighbours()


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """What differs between two fingerprints, one phrase per entry. Of two types of data only the types are named."""
    if old.get("type") != new.get("type"):
        return [_change(f"{prefix}type", old.get("type"), new.get("type"))]
    changed = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            changed += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            changed.append(_change(f"{prefix}{key}", before, after))
    return changed


def _change(name: str, before: Any, after: Any) -> str:
    if all(isinstance(value, str) and _DIGEST.fullmatch(value) for value in (before, after)):
        return f"{name} has other contents"
    return f"{name} was {_shown(before)} and is {_shown(after)}"


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "a table" if isinstance(value, dict) else "a list"
    return "missing" if value is None else str(value)[:_MAX_SHOWN]
