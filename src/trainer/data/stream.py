"""Which rows a step reads: positions in the stream of all epochs, with ranges passed over on purpose."""

from typing import Any

import numpy as np

from configs.errors import ConfigError


class RowStream:
    """The stream of rows cut into steps of `batch_size`. Its state is a position and the skipped ranges."""

    def __init__(self, *, num_rows: int, batch_size: int) -> None:
        """Args:
        num_rows: rows per epoch.
        batch_size: rows per step.
        """
        self._num_rows = num_rows
        self._batch_size = batch_size
        self._skips: list[tuple[int, int]] = []
        """[start, stop) in stream positions, ascending, apart. A start is always the first row of a step, so the rows
        of one step are consecutive."""

    def position(self, step: int) -> int:
        """Stream position of the first row of a step."""
        position = step * self._batch_size
        for start, stop in self._skips:
            if position < start:
                break
            position += stop - start
        return position

    def rows(self, step: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(epochs, indices), each (n,) int64, of the rows at these places (n,) of a step."""
        positions = self.position(step) + places.astype(np.int64)
        return positions // self._num_rows, positions % self._num_rows

    def skip(self, first_step: int, last_step: int) -> None:
        """Pass over the rows of these steps from now on."""
        if not 0 <= first_step <= last_step:
            raise ValueError(f"steps {first_step} to {last_step} cannot be skipped")
        start, stop = self.position(first_step), self.position(last_step) + self._batch_size
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
        return {
            "epoch": epoch,
            "index": index,
            "batch_size": self._batch_size,
            "skips": [list(span) for span in self._skips],
        }

    def load_state_dict(self, state: dict[str, Any], next_step: int) -> None:
        """Raises:
        ConfigError: key "resume": the state is incomplete, of another batch size, or not of this step.
        """
        missing = {"epoch", "index", "batch_size", "skips"} - state.keys()
        if missing:
            raise ConfigError.one("resume", f"the checkpoint's data state lacks {', '.join(sorted(missing))}")
        if state["batch_size"] != self._batch_size:
            # Steps would stand for other rows, and "the rows of step k" would depend on when the size changed.
            raise ConfigError.one(
                "resume",
                f"data.batch_size was {state['batch_size']} in the checkpoint and is {self._batch_size} now; "
                "a resumed run keeps it",
            )
        try:
            there = int(state["epoch"]) * self._num_rows + int(state["index"])
            self._skips = [(int(start), int(stop)) for start, stop in state["skips"]]
        except (TypeError, ValueError) as error:
            raise ConfigError.one("resume", f"the checkpoint's data state is damaged ({error})") from error
        here = self.position(next_step)
        if here != there:
            raise ConfigError.one(
                "resume",
                f"the checkpoint's data state stands at row {there} of the stream, but step {next_step} begins at "
                f"row {here}",
            )


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """What differs between two fingerprints, one phrase per entry."""
    changed = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            changed += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            changed.append(f"{prefix}{key} was {before} and is {after}")
    return changed
