"""Where two runs differ: step by step in what their records share, key by key in their configs."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from configs.schema import flatten
from trainer.reports.records import Column, MetricsFile, planned_steps, read_config

ROWS, LOSS, GRAD_NORM, LR, WEIGHTS = "digest/rows", "loss/mean", "optim/grad_norm", "optim/lr", "digest/params"

MAIN_METRICS: dict[str, str] = {
    ROWS: "row digest",
    LOSS: "loss",
    GRAD_NORM: "gradient norm",
    LR: "learning rate",
    WEIGHTS: "parameter checksum",
}
"""What is always compared, in the order in which a step computes it. Held-out metrics and the gradient norms of the
parameter groups come after."""

_OF_THE_FOLDER = ("output_dir", "run.name", "clean", "resume")
"""Keys that say where a run lies and how it was started last, not what it computes."""

ABSENT = "(absent)"


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """One side of the comparison."""

    path: Path
    config: dict[str, Any]
    metrics: MetricsFile

    @property
    def planned(self) -> int | None:
        return planned_steps(self.config)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The values of one metric at the first step where they differ; NaN for a number that was not finite."""

    step: int
    a: float | str
    b: float | str


@dataclass(frozen=True, kw_only=True)
class MetricComparison:
    """One metric over the steps that both runs have on record."""

    name: str
    num_steps: int
    """Steps compared. 0: only one of the runs has it, or at other steps."""

    num_different: int
    first: Difference | None
    counts: bool
    """Whether a difference makes the runs different; not so for checksums of weights that need not be bit-equal."""

    only: Literal["a", "b"] | None = None
    """The run that alone has it."""

    @property
    def label(self) -> str:
        return MAIN_METRICS.get(self.name, self.name)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The last value of one held-out metric in each run, with its step; None where a run has none."""

    name: str
    a: tuple[int, float] | None
    b: tuple[int, float] | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All that `compare-runs` says."""

    a: RecordedRun
    b: RecordedRun
    config: dict[str, tuple[Any, ...]] | None
    """Values by full key where they differ, ABSENT where a run has no such key. None: not compared."""

    metrics: list[MetricComparison]
    held_out: list[HeldOut]

    @property
    def first(self) -> list[MetricComparison]:
        """What differs at the first step where anything that counts does; empty where nothing differs."""
        different = [metric for metric in self.metrics if metric.first is not None]
        steps = [metric.first.step for metric in different if metric.first is not None and metric.counts]
        return [
            metric for metric in different if metric.first is not None and metric.first.step == min(steps, default=-1)
        ]

    @property
    def equal(self) -> bool:
        return self.num_compared > 0 and not self.first and not self.config

    @property
    def num_compared(self) -> int:
        """Metrics that have a step in common."""
        return sum(metric.num_steps > 0 for metric in self.metrics)

    @property
    def has_held_out(self) -> bool:
        """Some held-out metric has a value in both runs, if only at different steps."""
        return any(row.a is not None and row.b is not None for row in self.held_out)


def read_run(path: Path) -> RecordedRun:
    """What is on record of a run now.

    Raises:
        ConfigError: a file of it cannot be read.
    """
    metrics = MetricsFile(path / "metrics.jsonl", _is_compared)
    metrics.update()
    metrics.close()
    return RecordedRun(path=path, config=read_config(path), metrics=metrics)


def _is_compared(name: str) -> bool:
    return name in MAIN_METRICS or name.startswith(("val/", f"{GRAD_NORM}/"))


def compare(a: RecordedRun, b: RecordedRun, *, rtol: float, with_config: bool) -> Comparison:
    """Compare two runs.

    Args:
        rtol: numbers are equal up to this part of the larger one; 0 for bit-equal.
        with_config: compare the configs too.
    """
    return Comparison(
        a=a,
        b=b,
        config=config_differences(a.config, b.config) if with_config else None,
        metrics=[_compare_metric(name, a.metrics, b.metrics, rtol) for name in _shared_order(a.metrics, b.metrics)],
        held_out=[
            HeldOut(name=name, a=_last(a.metrics.column(name)), b=_last(b.metrics.column(name)))
            for name in _shared_order(a.metrics, b.metrics)
            if name.startswith("val/")
        ],
    )


def config_differences(*configs: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Values by full key where configs differ, in their order, less what only says where a run lies. ABSENT stands for
    a key that a config does not have."""
    flat = [flatten(config) for config in configs]
    found = {}
    for key in dict.fromkeys(key for one in flat for key in one):
        if key in _OF_THE_FOLDER or key.startswith("resume."):
            continue
        values = tuple(one.get(key, ABSENT) for one in flat)
        if not all(_same(values[0], value) for value in values[1:]):
            found[key] = values
    return found


def _same(a: Any, b: Any) -> bool:
    # A key that came with a later version and is not set is no setting.
    a, b = (None if value is ABSENT else value for value in (a, b))
    # As text too: NaN differs from itself.
    return a == b or repr(a) == repr(b)


def _shared_order(a: MetricsFile, b: MetricsFile) -> Iterator[str]:
    """Names that either has: the main ones in the order of a step, then the others as they were first recorded."""
    present = dict.fromkeys([*a.text_names, *b.text_names, *a.names, *b.names])
    yield from (name for name in MAIN_METRICS if name in present)
    yield from (name for name in present if name.startswith(f"{GRAD_NORM}/"))
    yield from (name for name in present if name.startswith("val/"))


def _compare_metric(name: str, a: MetricsFile, b: MetricsFile, rtol: float) -> MetricComparison:
    if name in (ROWS, WEIGHTS):
        steps_a, steps_b, shared, first, different = _compare_texts(a.texts(name), b.texts(name))
    else:
        steps_a, steps_b, shared, first, different = _compare_numbers(a.column(name), b.column(name), rtol)
    return MetricComparison(
        name=name,
        num_steps=shared,
        num_different=different,
        first=first,
        # Weights that were allowed to drift by rtol are not bit-equal, and a checksum knows nothing in between.
        counts=name != WEIGHTS or rtol == 0,
        only="a" if not steps_b else "b" if not steps_a else None,
    )


def _compare_texts(a: dict[int, str], b: dict[int, str]) -> tuple[int, int, int, Difference | None, int]:
    shared = a.keys() & b.keys()
    different = [step for step in shared if a[step] != b[step]]
    step = min(different, default=None)
    first = None if step is None else Difference(step=step, a=a[step], b=b[step])
    return len(a), len(b), len(shared), first, len(different)


def _compare_numbers(a: Column, b: Column, rtol: float) -> tuple[int, int, int, Difference | None, int]:
    steps, at_a, at_b = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    values_a, values_b = a.values[at_a], b.values[at_b]
    equal = values_a == values_b
    equal |= np.isnan(values_a) & np.isnan(values_b)
    if rtol > 0:
        equal |= np.abs(values_a - values_b) <= rtol * np.maximum(np.abs(values_a), np.abs(values_b))
    different = np.flatnonzero(~equal)
    first = None
    if len(different):
        at = different[0]
        first = Difference(step=int(steps[at]), a=float(values_a[at]), b=float(values_b[at]))
    return len(a.steps), len(b.steps), len(steps), first, len(different)


def _last(column: Column) -> tuple[int, float] | None:
    return (int(column.steps[-1]), float(column.values[-1])) if len(column.steps) else None
