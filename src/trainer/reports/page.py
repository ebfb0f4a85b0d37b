"""The page: one HTML file with the plotting library, the curves and their script, which needs no network.

What comes from runs (names, settings, names of metrics) reaches the page in two ways: as escaped text in tables, and
as JSON that the script puts on the page as text. The content policy at the top lets the browser run our two scripts
only.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from configs.safe_text import one_line, star_secrets
from trainer.errors import RunError
from trainer.files import write_whole
from trainer.reports.curves import (
    SPIKE_DEVIATIONS,
    Card,
    Curve,
    Section,
    build_sections,
    is_thinned,
)
from trainer.reports.runs import PlottedRun
from trainer.reports.tables import all_settings_table, settings_table, summary_table, text

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<header>
<h1>{heading}</h1>
{summary}
</header>
<nav id="controls" aria-label="Plots"></nav>
<main id="plots"></main>
<section class="config">
<h2>{settings_title}</h2>
{settings}
<details data-fold="config"><summary>All settings</summary>{all_settings}</details>
</section>
<footer><p>{notes}</p></footer>
<noscript>The plots need JavaScript.</noscript>
<script id="report" type="application/json">{payload}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def render_page(runs: Sequence[PlottedRun], *, refresh: float | None) -> str:
    """The page of some runs as they are now.

    Args:
        runs: at least one.
        refresh: seconds after which the page loads itself again; None for a page that is final.
    """
    from plotly.offline import get_plotlyjs

    sections = build_sections(runs)
    # A script cannot hold "</script", nor "<!--".
    payload = json.dumps(_payload(sections, runs, refresh), allow_nan=False).replace("<", "\\u003c")
    plotly, script = get_plotlyjs(), _asset("page.js")
    policy = (
        f"default-src 'none'; script-src {_hash(plotly)} {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    one = len(runs) == 1
    names = ", ".join(run.label for run in runs)
    return _PAGE.format(
        policy=policy,
        title=text(names if len(names) < 80 else f"{len(runs)} runs"),
        css=_asset("page.css"),
        heading=text(runs[0].label) if one else f"{len(runs)} runs",
        summary=summary_table(runs),
        settings_title="Settings" if one else "Settings that differ",
        settings=settings_table(runs),
        all_settings=all_settings_table(runs),
        notes=escape(_notes(sections, runs)),
        payload=payload,
        plotly=plotly,
        script=script,
    )


def write_page(path: Path, page: str) -> None:
    """Put the page in its place at once: a browser never loads half of one.

    Raises:
        RunError: it cannot be written.
    """
    try:
        write_whole(path, page.encode())
    except OSError as error:
        raise RunError(f"the page {path} cannot be written: {error.strerror}") from error


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _notes(sections: Sequence[Section], runs: Sequence[PlottedRun]) -> str:
    notes = [
        "Smooth curves are exponential means that reach back over the square root of the number of steps.",
        "On the loss, crosses mark skipped updates and triangles spikes: more than "
        f"{SPIKE_DEVIATIONS:g} standard deviations above the 128 steps before.",
        "Hours are those on record: steps, validations, waits for checkpoints; not starts.",
    ]
    if is_thinned(sections, runs):
        notes.append(
            "Long curves are thinned for display: cut into stretches of equally many points, of each the lowest and "
            "the highest are drawn, so that no spike is lost. metrics.jsonl has every step."
        )
    return " ".join(notes)


def _payload(sections: Sequence[Section], runs: Sequence[PlottedRun], refresh: float | None) -> dict[str, Any]:
    return {
        "runs": [one_line(star_secrets(run.label)) for run in runs],
        "refresh": refresh,
        "sections": [
            {
                "title": section.title,
                "folded": section.folded,
                "note": section.note,
                "cards": [_card_json(card) for card in section.cards],
            }
            for section in sections
        ],
    }


def _card_json(card: Card) -> dict[str, Any]:
    spec = card.spec
    return {
        "title": one_line(spec.title),
        "unit": spec.unit,
        "variants": [one_line(variant) for variant in spec.variants],
        "number": spec.number,
        "log": spec.log,
        "smoothed": spec.smoothed,
        "wide": spec.wide,
        "curves": [_curve_json(curve) for curve in card.curves],
    }


def _curve_json(curve: Curve) -> dict[str, Any]:
    return {
        "run": curve.run,
        "metric": one_line(curve.metric),
        "variant": curve.variant,
        "kind": curve.kind,
        "x": {axis: _array_json(values) for axis, values in curve.x.items()},
        "y": _array_json(curve.values),
    }


def _array_json(values: np.ndarray) -> dict[str, str]:
    """Numbers as base64, a third of their text: int32 where all are whole and fit, else float64."""
    whole = values.dtype.kind == "i" and (not len(values) or int(values.max()) < 2**31)
    data = values.astype("<i4" if whole else "<f8")
    return {"dtype": "i4" if whole else "f8", "bdata": base64.b64encode(data.tobytes()).decode()}
