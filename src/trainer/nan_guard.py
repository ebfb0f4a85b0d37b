"""What follows from steps whose loss or gradient is not finite. Their updates are skipped on the device already."""

from collections import deque
from typing import Any, Literal

from configs.checkpoint import NanGuardConfig


class NanGuard:
    """Counts skipped steps in a row. All ranks feed it the same numbers and so come to the same verdict."""

    def __init__(self, config: NanGuardConfig) -> None:
        self._config = config
        self._first_bad: int | None = None
        self._rewinds = 0
        self.skipped_steps = 0
        self.nan_count = 0

    def observe(self, step: int, *, updated: bool, loss_finite: bool) -> Literal["go on", "rewind", "stop"]:
        """Take note of step `step`; say what the run has to do."""
        self.nan_count += not loss_finite
        if updated:
            self._first_bad = None
            return "go on"
        self.skipped_steps += 1
        if self._first_bad is None:
            self._first_bad = step
        if step - self._first_bad + 1 < self._config.max_consecutive:
            return "go on"
        return "rewind" if self._rewinds < self._config.max_rewinds else "stop"

    @property
    def first_bad(self) -> int | None:
        """First step of the current series of skipped steps."""
        return self._first_bad

    def rewound(self) -> None:
        """The run went back: the series is over."""
        self._rewinds += 1
        self._first_bad = None

    def state_dict(self) -> dict[str, Any]:
        """JSON."""
        return {
            "first_bad": self._first_bad,
            "rewinds": self._rewinds,
            "skipped_steps": self.skipped_steps,
            "nan_count": self.nan_count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first_bad = state["first_bad"]
        self._rewinds = state["rewinds"]
        self.skipped_steps = state["skipped_steps"]
        self.nan_count = state["nan_count"]


class SpikeMeter:
    """How many standard deviations a value lies above the mean of the last `window` values; 0 until it is full."""

    def __init__(self, window: int = 128) -> None:
        self._window = window
        self._values: deque[float] = deque(maxlen=window)

    def observe(self, value: float) -> float:
        """Score of `value` against the values before it."""
        score = 0.0
        if len(self._values) == self._window:
            mean = sum(self._values) / self._window
            variance = sum((past - mean) ** 2 for past in self._values) / self._window
            score = (value - mean) / max(variance**0.5, 1e-12)
        if value == value and abs(value) != float("inf"):
            self._values.append(value)
        return score

    def state_dict(self) -> list[float]:
        """JSON."""
        return list(self._values)

    def load_state_dict(self, values: list[float]) -> None:
        self._values = deque(values, maxlen=self._window)
