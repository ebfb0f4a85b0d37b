"""The tables of a report as HTML: where each run stands, and with which settings. All text is escaped here."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np

from configs.safe_text import SECRET_NAME, one_line, star_secrets
from configs.schema import flatten
from trainer.reports.comparison_text import show_value
from trainer.reports.differences import config_differences
from trainer.reports.runs import PlottedRun
from trainer.reports.thinning import smooth, smooth_span
from trainer.text import with_unit

_KEY_SETTINGS = (
    "max_steps",
    "model.",
    "tokenizer.",
    "data.",
    "optim.",
    "scheduler.",
    "val.",
    "deployment.num_train_gpus",
)
_LESS_KEY = ("model.debug.", "data.num_workers", "val.micro_batch_tokens")
_MOST_HELD_OUT = 4


def text(value: str) -> str:
    """Text for a page: no markup, no character that changes direction, no secret."""
    return escape(one_line(star_secrets(value)))


def summary_table(runs: Sequence[PlottedRun]) -> str:
    """One row a run: state, how far it is, and its numbers at the last step. What no run has is left out."""
    columns = [(title, [cell(run) for run in runs]) for title, cell in _summary_columns(runs)]
    columns = [(title, cells) for title, cells in columns if any(cells)]
    head = "".join(f"<th>{text(title)}</th>" for title, _ in columns)
    rows = []
    for number, run in enumerate(runs):
        cells = "".join(f"<td>{text(column[number]) or '&ndash;'}</td>" for _, column in columns)
        name = f'<th scope="row"><i class="swatch" data-run="{number}"></i>{text(run.label)}</th>'
        state = f'<td><span class="state {run.state}">{run.state}</span></td>'
        rows.append(f"<tr>{name}{state}{cells}</tr>")
    return _table(f"<th>Run</th><th>State</th>{head}", rows, "summary")


def settings_table(runs: Sequence[PlottedRun]) -> str:
    """Where the configs of several runs differ; the main settings of one."""
    if len(runs) > 1:
        different = config_differences(*(run.config for run in runs))
        return _settings(runs, different) if different else "<p>The configs are the same.</p>"
    flat = flatten(runs[0].config)
    shown = {
        key: (value,)
        for key, value in flat.items()
        if key.startswith(_KEY_SETTINGS) and not key.startswith(_LESS_KEY) and value not in (None, {}, [])
    }
    return _settings(runs, shown)


def all_settings_table(runs: Sequence[PlottedRun]) -> str:
    """Every key of every config."""
    flat = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    return _settings(runs, {key: tuple(one.get(key) for one in flat) for key in keys})


def _settings(runs: Sequence[PlottedRun], values: dict[str, tuple[Any, ...]]) -> str:
    names = "".join(f'<th><i class="swatch" data-run="{n}"></i>{text(run.label)}</th>' for n, run in enumerate(runs))
    rows = [
        f'<tr><th scope="row"><code>{text(key)}</code></th>'
        + "".join(f"<td><code>{text(_shown(key, value))}</code></td>" for value in row)
        + "</tr>"
        for key, row in values.items()
    ]
    return _table(f"<th>Setting</th>{names}", rows, "settings")


def _table(head: str, rows: Sequence[str], kind: str) -> str:
    body = "".join(rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _shown(key: str, value: Any) -> str:
    hidden = isinstance(value, str) and SECRET_NAME.search(key.rpartition(".")[2])
    return "***" if hidden else show_value(value)


def _summary_columns(runs: Sequence[PlottedRun]) -> list[tuple[str, Callable[[PlottedRun], str]]]:
    names = list(dict.fromkeys(name for run in runs for name in run.metrics.names if name.startswith("val/")))
    # Bits per byte say what the loss says and compare between tokenizers.
    best = [name for name in names if _metric(name).startswith(("bpb", "acc"))]
    best = best or [name for name in names if not _metric(name).startswith("perplexity")]
    return [
        ("Step", _steps),
        ("Tokens", lambda run: _last(run, "progress/num_tokens", with_unit)),
        ("Epoch", lambda run: _last(run, "progress/epoch", "{:.3f}".format)),
        ("Loss", lambda run: _last(run, "loss/mean", "{:.4f}".format)),
        ("Loss, smooth", _smooth_loss),
        *[
            (name.removeprefix("val/").replace("/", " "), lambda run, name=name: _last(run, name, "{:.4f}".format))
            for name in best[:_MOST_HELD_OUT]
        ],
        ("Tokens/s", lambda run: _median(run, "perf/throughput", with_unit)),
        ("MFU", lambda run: _median(run, "perf/mfu", "{:.1f} %".format)),
        ("s/step", lambda run: _median(run, "time/step", "{:.3g}".format)),
        ("Peak memory", lambda run: _last(run, "perf/peak_memory", "{:.1f} GiB".format)),
        ("Time", _hours),
        ("Parameters", lambda run: _last(run, "params/num_params", with_unit)),
    ]


def _metric(name: str) -> str:
    """The last part of a name: a set may be called as a metric is."""
    return name.rpartition("/")[2]


def _steps(run: PlottedRun) -> str:
    return f"{run.last_step:,} / {run.planned:,}" if run.planned else f"{run.last_step:,}"


def _finite(run: PlottedRun, name: str) -> np.ndarray:
    values = run.metrics.column(name).values
    return values[np.isfinite(values)]


def _last(run: PlottedRun, name: str, form: Callable[[float], str]) -> str:
    values = _finite(run, name)
    return form(float(values[-1])) if len(values) else ""


def _median(run: PlottedRun, name: str, form: Callable[[float], str]) -> str:
    values = _finite(run, name)
    return form(float(np.median(values))) if len(values) else ""


def _smooth_loss(run: PlottedRun) -> str:
    values = _finite(run, "loss/mean")
    # What lies further back than ten spans weighs nothing.
    span = smooth_span(len(values))
    return f"{smooth(values[-int(10 * span) :], span)[-1]:.4f}" if len(values) else ""


def _hours(run: PlottedRun) -> str:
    hours = float(run.axes().at("hours", np.array([run.last_step]))[0])
    if math.isnan(hours):
        return ""
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"
