"""Which rank is slow: times of single ranks, reduced over all of them.

A rank's own times are known when its device has ended the step. To reduce them then would make the host wait, so they
travel with the statistics of the next step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.metrics import MetricsAccumulator

_RANKS = 2**20
"""More than there are. Microseconds times this stay whole numbers of float64 up to two hours."""


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Seconds of one step on one rank."""

    step: float
    """All of it, so with the waiting for slower ranks."""

    update: float
    """The optimizer's update, in which no rank waits for another."""


def add_times(stats: MetricsAccumulator, times: RankTimes, rank: int) -> None:
    """Put this rank's times among the statistics to be reduced."""
    for name, seconds in (("step", times.step), ("update", times.update)):
        stats.add_sum(f"seconds/{name}", seconds)
        stats.add_max(f"slowest/{name}", _encode(seconds, rank))


def read_times(values: Mapping[str, float], world_size: int) -> dict[str, float | int]:
    """The metrics of docs/metrics.md from what was reduced; none where no times were added."""
    metrics: dict[str, float | int] = {}
    for name in ("step", "update"):
        if f"slowest/{name}" in values:
            seconds, rank = _decode(values[f"slowest/{name}"])
            metrics[f"time/{name}/max"] = seconds
            metrics[f"time/{name}/mean"] = values[f"seconds/{name}"] / world_size
            metrics[f"time/{name}/slowest_rank"] = rank
    return metrics


def _encode(seconds: float, rank: int) -> float:
    """One number, so that one maximum finds the time and whose it is. Exact to a microsecond."""
    return float(round(seconds * 1e6) * _RANKS + rank)


def _decode(code: float) -> tuple[float, int]:
    microseconds, rank = divmod(int(code), _RANKS)
    return microseconds / 1e6, rank
