"""Which curves a report shows, in which cards, and their points."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from trainer.reports.runs import AXES, Axis, PlottedRun
from trainer.reports.thinning import points_each, smooth, smooth_span, thin

MAX_POINTS = 2000
"""Most points of one curve."""

POINT_BUDGET = 240_000
"""Most points of all curves of a page: 38 bytes each beside the 5 MB of the plotting library."""

SPIKE_DEVIATIONS = 6.0
_MAX_MARKS = 200
_SPIKE_GAP = 16
_MAX_OTHER = 60

Kind = Literal["raw", "smooth", "skipped", "spike"]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points of one metric of one run; or marks on its curve."""

    run: int
    metric: str
    variant: int
    kind: Kind
    steps: np.ndarray
    """(n,) int64."""

    values: np.ndarray
    """(n,) float64; NaN makes a gap."""

    x: dict[Axis, np.ndarray] = field(default_factory=dict)
    """The position of each point on every axis."""


@dataclass(frozen=True, kw_only=True)
class CardSpec:
    """A plot and what it shows."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    """Variants of one thing, told apart by dashes: held-out windows of several lengths, say."""

    variants: tuple[str, ...] = ()
    """What to call them; empty for one."""

    number: str = "~g"
    """How numbers on the axis are written (d3-format)."""

    log: bool = False
    smoothed: bool = False
    wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Card:
    spec: CardSpec
    curves: list[Curve]


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    folded: bool
    cards: list[Card]
    note: str = ""


_LOSS = CardSpec(title="Training loss", unit="nats per token", metrics=("loss/mean",), smoothed=True, wide=True)
_OPTIMISATION = (
    CardSpec(title="Learning rate", unit="", metrics=("optim/lr",)),
    CardSpec(title="Gradient norm", unit="before clipping", metrics=("optim/grad_norm",), log=True, smoothed=True),
    CardSpec(title="Skipped updates", unit="steps so far", metrics=("optim/skipped_steps",), number="~d"),
)
_SPEED = (
    CardSpec(title="Throughput", unit="tokens/s", metrics=("perf/throughput",), number="~s", smoothed=True),
    CardSpec(title="Model FLOPs utilisation", unit="%", metrics=("perf/mfu",), smoothed=True),
    CardSpec(title="Peak memory", unit="GiB, largest rank", metrics=("perf/peak_memory",)),
    CardSpec(title="Step", unit="s", metrics=("time/step",), smoothed=True),
    CardSpec(title="Forward and backward", unit="s", metrics=("time/forward_backward",), smoothed=True),
    CardSpec(title="Wait for data", unit="s, slowest rank", metrics=("time/data/max",), smoothed=True, log=True),
    CardSpec(title="Checkpoint", unit="s the loop stood still", metrics=("time/save_ckpt",)),
    CardSpec(title="Validation", unit="s a round", metrics=("time/val",)),
    CardSpec(title="Scoring beside the run", unit="s a round", metrics=("time/eval",)),
)
_HELD_OUT_UNITS = {
    "bpb": "bits per byte",
    "acc": "accuracy",
    "acc_norm": "accuracy per byte",
    "margin": "margin",
    "loss": "nats per token",
}
"""Units of held-out metrics, in the order of their cards."""

_COVERED = ("params/", "progress/", "loss/", "optim/", "perf/", "time/", "val/", "digest/")
"""Prefixes that have cards of their own, or say nothing as a curve."""


def build_sections(runs: Sequence[PlottedRun]) -> list[Section]:
    """All cards that have a point to show, points thinned to what a page can hold.

    Args:
        runs: at least one; curves name them by their place here.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.metrics.names))
    groups = [name for name in names if name.startswith("optim/grad_norm/")]
    other = [name for name in names if not name.startswith(_COVERED)]
    left_out = f"{len(other) - _MAX_OTHER} more are in metrics.jsonl" if len(other) > _MAX_OTHER else ""
    plan = [
        ("Loss", False, [_LOSS, *_held_out_cards(names)], ""),
        ("Optimisation", False, list(_OPTIMISATION), ""),
        ("Speed and memory", False, list(_SPEED), ""),
        ("Gradient norm by group", True, [_plain(name, name.rpartition("/")[2], log=True) for name in groups], ""),
        ("Other metrics", True, [_plain(name, name) for name in other[:_MAX_OTHER]], left_out),
    ]
    sections = []
    for title, folded, specs, note in plan:
        cards = [Card(spec=spec, curves=list(_curves(spec, runs))) for spec in specs]
        shown = [card for card in cards if any(_has_point(curve) for curve in card.curves) and not _is_idle(card)]
        if shown:
            sections.append(Section(title=title, folded=folded, cards=shown, note=note))
    return _thinned(sections, runs)


def _plain(metric: str, title: str, log: bool = False) -> CardSpec:
    return CardSpec(title=title, unit="", metrics=(metric,), log=log)


def _held_out_cards(names: Sequence[str]) -> list[CardSpec]:
    """One card for each held-out set and metric; window lengths are its variants. Perplexity is the loss once more."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name in names:
        if name.startswith("val/"):
            held_out, _, metric = name.removeprefix("val/").rpartition("/")
            metric, _, length = metric.partition("@")
            if metric != "perplexity":
                found.setdefault((held_out, metric), []).append((length, name))
    order = list(_HELD_OUT_UNITS)
    cards = []
    for held_out, metric in sorted(found, key=lambda key: order.index(key[1]) if key[1] in order else len(order)):
        lengths, members = zip(*found[held_out, metric], strict=True)
        cards.append(
            CardSpec(
                title=f"Held-out {held_out}".strip(),
                unit=_HELD_OUT_UNITS.get(metric, metric),
                metrics=members,
                variants=tuple(f"@{length}" if length else "" for length in lengths),
            )
        )
    return cards


def _curves(spec: CardSpec, runs: Sequence[PlottedRun]) -> Iterator[Curve]:
    for number, run in enumerate(runs):
        for variant, metric in enumerate(spec.metrics):
            column = run.metrics.column(metric)
            if not len(column.steps):
                continue
            raw = Curve(
                run=number, metric=metric, variant=variant, kind="raw", steps=column.steps, values=column.values
            )
            yield raw
            if spec.smoothed:
                yield replace(raw, kind="smooth", values=smooth(column.values, smooth_span(len(column.steps))))
            if metric == "loss/mean":
                yield from _marks(raw, run)


def _marks(loss: Curve, run: PlottedRun) -> Iterator[Curve]:
    """Steps without an update, at the height of the last finite loss; and spikes of the loss."""
    skipped = run.metrics.column("optim/skipped_steps")
    rises = skipped.steps[np.diff(skipped.values, prepend=0) > 0]
    yield from _mark(loss, "skipped", rises[-_MAX_MARKS:])
    spike = run.metrics.column("loss/spike")
    yield from _mark(loss, "spike", spike.steps[_peaks(spike.values)][-_MAX_MARKS:])


def _peaks(spike: np.ndarray) -> np.ndarray:
    """Where spikes are highest: steps above the bound that follow each other closely are one."""
    high = np.flatnonzero(spike > SPIKE_DEVIATIONS)
    groups = np.split(high, np.flatnonzero(np.diff(high) > _SPIKE_GAP) + 1) if len(high) else []
    return np.array([group[spike[group].argmax()] for group in groups], np.int64)


def _mark(loss: Curve, kind: Kind, steps: np.ndarray) -> Iterator[Curve]:
    finite = np.flatnonzero(np.isfinite(loss.values))
    if len(steps) and len(finite):
        at = np.searchsorted(loss.steps[finite], steps, side="right") - 1
        yield replace(loss, kind=kind, steps=steps, values=loss.values[finite[np.maximum(at, 0)]])


def _has_point(curve: Curve) -> bool:
    return bool(np.isfinite(curve.values).any())


def _is_idle(card: Card) -> bool:
    """A counter of faults that no run has."""
    return card.spec.metrics == ("optim/skipped_steps",) and not any(np.any(curve.values > 0) for curve in card.curves)


def _thinned(sections: list[Section], runs: Sequence[PlottedRun]) -> list[Section]:
    axes = [run.axes() for run in runs]
    curves = [curve for section in sections for card in section.cards for curve in card.curves]
    most = points_each([len(curve.steps) for curve in curves], budget=POINT_BUDGET, most=MAX_POINTS)

    def drawn(curve: Curve) -> Curve:
        kept = thin(curve.values, most)
        steps, values = curve.steps[kept], curve.values[kept]
        return replace(curve, steps=steps, values=values, x={axis: axes[curve.run].at(axis, steps) for axis in AXES})

    def drawn_card(card: Card) -> Card:
        return replace(card, curves=[drawn(curve) for curve in card.curves])

    return [replace(section, cards=[drawn_card(card) for card in section.cards]) for section in sections]


def is_thinned(sections: Sequence[Section], runs: Sequence[PlottedRun]) -> bool:
    """Some curve has fewer points than its records."""
    return any(
        curve.kind == "raw" and len(curve.steps) < len(runs[curve.run].metrics.column(curve.metric).steps)
        for section in sections
        for card in section.cards
        for curve in card.curves
    )
