"""The words of `compare-runs`: text for people, JSON for machines."""

import json
import math
from collections.abc import Sequence
from typing import Any

from configs.safe_text import one_line, star_secrets
from trainer.monitors.jsonl import json_value
from trainer.reports.differences import (
    ABSENT,
    GRAD_NORM,
    LOSS,
    LR,
    MAIN_METRICS,
    ROWS,
    WEIGHTS,
    Comparison,
    Difference,
    HeldOut,
    MetricComparison,
    RecordedRun,
)

_RED, _GREEN, _BOLD, _PLAIN = "31", "32", "1", ""

_MEANING = {
    ROWS: "other rows: the data, its order or the batch is not the same",
    LOSS: "the rows are the same up to here, the loss is not: weights, model or arithmetic",
    GRAD_NORM: "rows and loss are the same up to here, the gradient is not",
    LR: "rows, loss and gradient are the same up to here, the learning rate is not",
    WEIGHTS: "rows, loss and gradient norm are the same up to here, the update is not",
}
"""What follows when this is the first of a step's metrics to differ, in the order in which a step computes them."""


def as_text(comparison: Comparison, *, rtol: float, colours: bool) -> str:
    """The report for people: the runs, configs, the first difference, all that was compared, held-out metrics."""
    paint = _Paint(colours)
    parts = [_runs(comparison), _config(comparison, paint), _first(comparison, rtol, paint), _compared(comparison)]
    if comparison.held_out:
        parts.append(_held_out(comparison.held_out))
    return "\n\n".join("\n".join(part) for part in parts)


def as_json(comparison: Comparison) -> str:
    """One JSON object; a number that was not finite is null. See docs/reports.md for its keys."""
    first = comparison.first
    value = {
        "equal": comparison.equal,
        "runs": {side: _run_json(run) for side, run in (("a", comparison.a), ("b", comparison.b))},
        "first_difference": {
            "step": first[0].first.step,
            "metrics": {m.name: {"a": json_value(m.first.a), "b": json_value(m.first.b)} for m in first if m.first},
        }
        if first and first[0].first is not None
        else None,
        "metrics": {
            metric.name: {
                "steps_compared": metric.num_steps,
                "steps_different": metric.num_different,
                "first_step": metric.first.step if metric.first is not None else None,
                "counts": metric.counts,
                "only": metric.only,
            }
            for metric in comparison.metrics
        },
        "config": None
        if comparison.config is None
        else {
            key: {side: item for side, item in zip("ab", pair, strict=True) if item is not ABSENT}
            for key, pair in comparison.config.items()
        },
        "held_out": {row.name: {"a": _last_json(row.a), "b": _last_json(row.b)} for row in comparison.held_out},
    }
    return star_secrets(json.dumps(value, indent=2, allow_nan=False, default=str))


class _Paint:
    """ANSI colours, or none."""

    def __init__(self, colours: bool) -> None:
        self._colours = colours

    def __call__(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colours and code else text


def _runs(comparison: Comparison) -> list[str]:
    rows = [[side, str(run.path), _steps(run)] for side, run in (("A", comparison.a), ("B", comparison.b))]
    return _table(rows, indent="")


def _steps(run: RecordedRun) -> str:
    planned = f" of {run.planned}" if run.planned else ""
    return f"steps {run.metrics.first_step} to {run.metrics.last_step}{planned}"


def _config(comparison: Comparison, paint: _Paint) -> list[str]:
    if comparison.config is None:
        return ["config: not compared"]
    if not comparison.config:
        return [f"config: {paint(_GREEN, 'the same')}"]
    rows = [[key, *map(show_value, pair)] for key, pair in comparison.config.items()]
    count = len(rows)
    heading = f"config: {paint(_RED, f'{count} key differs' if count == 1 else f'{count} keys differ')}"
    return [heading, *_table([["", "A", "B"], *rows])]


def _first(comparison: Comparison, rtol: float, paint: _Paint) -> list[str]:
    first = comparison.first
    if not comparison.num_compared:
        return [f"steps: {paint(_RED, 'none in common')}, only the last held-out values can be set side by side"]
    if not first or first[0].first is None:
        within = f" within {rtol:g}" if rtol else ""
        return [f"steps: {paint(_GREEN, f'no difference{within}')} in what both runs have on record"]
    names = ", ".join(metric.label for metric in first if metric.name in MAIN_METRICS)
    names = names or ", ".join(metric.label for metric in first)
    heading = paint(_RED, f"step {first[0].first.step} is the first to differ")
    rows = [_difference_row(metric, metric.first) for metric in first if metric.first is not None]
    lines = [f"steps: {heading}, in: {names}", *_table([["", "A", "B", "relative"], *rows])]
    meaning = _meaning(comparison, first[0])
    return [*lines, f"  {meaning}"] if meaning else lines


def _meaning(comparison: Comparison, cause: MetricComparison) -> str | None:
    """What the first of the metrics to differ says; nothing where an earlier link of the chain was not compared."""
    order = list(_MEANING)
    if cause.name not in order:
        return None
    compared = {metric.name for metric in comparison.metrics if metric.num_steps}
    earlier = order[: order.index(cause.name)]
    return _MEANING[cause.name] if compared.issuperset(earlier) else None


def _difference_row(metric: MetricComparison, difference: Difference) -> list[str]:
    a, b = difference.a, difference.b
    if isinstance(a, str) or isinstance(b, str):
        return [metric.name, str(a), str(b), ""]
    largest = max(abs(a), abs(b))
    relative = f"{abs(a - b) / largest:.1e}" if math.isfinite(a - b) and largest else ""
    return [metric.name, _exact(a), _exact(b), relative]


def _compared(comparison: Comparison) -> list[str]:
    rows = [["compared", "steps", "different", "first at"]]
    for metric in comparison.metrics:
        # The table of held-out metrics shows what only one run has.
        if metric.name not in MAIN_METRICS and not metric.num_different:
            continue
        where = str(metric.first.step) if metric.first is not None else ""
        if metric.only is not None:
            where = f"only {metric.only.upper()} has it"
        elif not metric.num_steps:
            where = "no step in common"
        elif metric.first is not None and not metric.counts:
            where += " (does not count)"
        rows.append([metric.label, f"{metric.num_steps}", f"{metric.num_different}", where])
    lines = _table(rows, indent="", right=(1, 2))
    same = [m for m in comparison.metrics if m.name not in MAIN_METRICS and m.num_steps and not m.num_different]
    if same:
        lines.append(f"and {len(same)} more (held-out, gradient norms of groups): the same")
    last = {side: run.metrics.last_step or 0 for side, run in (("A", comparison.a), ("B", comparison.b))}
    if last["A"] != last["B"]:
        longer = max(last, key=lambda side: last[side])
        lines.append(f"{longer} goes on to step {last[longer]}: the steps after {min(last.values())} are not compared")
    return lines


def _held_out(held_out: list[HeldOut]) -> list[str]:
    """The last value of each held-out metric; the step beside it where it is not the same in all of the table."""
    steps = {last[0] for row in held_out for last in (row.a, row.b) if last is not None}
    with_step = len(steps) > 1
    heading = "held-out, at the last step with a value" if with_step else f"held-out, step {steps.pop()}"
    rows = [[heading, "A", "B", "B - A"]]
    for row in held_out:
        change = f"{row.b[1] - row.a[1]:+.3g}" if row.a is not None and row.b is not None else ""
        rows.append([row.name, _last(row.a, with_step), _last(row.b, with_step), change])
    return _table(rows, indent="", right=(1, 2, 3))


def _last(last: tuple[int, float] | None, with_step: bool) -> str:
    if last is None:
        return "none"
    return f"{last[1]:.10g} @ step {last[0]}" if with_step else f"{last[1]:.10g}"


def _table(rows: Sequence[Sequence[str]], *, indent: str = "  ", right: tuple[int, ...] = ()) -> list[str]:
    """Aligned columns. Characters that a terminal obeys are shown as escapes, secrets as ***."""
    shown = [[one_line(star_secrets(cell)) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    return [
        (
            indent
            + "  ".join(
                cell.rjust(width) if column in right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        ).rstrip()
        for row in shown
    ]


def show_value(value: Any) -> str:
    """A config value as JSON, ABSENT as it is."""
    return value if value is ABSENT else json.dumps(value, ensure_ascii=False)


def _exact(value: float) -> str:
    """All digits of the float64; integers of a float metric keep their point."""
    return "not finite" if math.isnan(value) else repr(value)


def _run_json(run: RecordedRun) -> dict[str, Any]:
    return {
        "path": str(run.path),
        "first_step": run.metrics.first_step,
        "last_step": run.metrics.last_step,
        "max_steps": run.planned,
    }


def _last_json(last: tuple[int, float] | None) -> dict[str, Any] | None:
    return None if last is None else {"step": last[0], "value": json_value(last[1])}
