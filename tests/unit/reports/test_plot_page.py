"""`plot-runs`: what the page holds, read without a browser."""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from trainer.reports.curves import POINT_BUDGET
from trainer.reports.plot import run_plot
from trainer.reports.thinning import points_each, smooth, thin


def report_of(page: Path) -> dict:
    """The JSON that the page's script draws from."""
    found = re.search(r'<script id="report" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def numbers(packed: dict) -> list:
    return np.frombuffer(base64.b64decode(packed["bdata"]), f"<{packed['dtype']}").tolist()


def cards_of(report: dict) -> dict[str, dict]:
    return {f"{card['title']}, {card['unit']}": card for section in report["sections"] for card in section["cards"]}


def curve_of(card: dict, run: int, kind: str = "raw", variant: int = 0) -> dict:
    (curve,) = [c for c in card["curves"] if (c["run"], c["kind"], c["variant"]) == (run, kind, variant)]
    return {axis: numbers(packed) for axis, packed in curve["x"].items()} | {"y": numbers(curve["y"])}


def test_curves_are_the_records(make_run: Callable, record: Callable, tmp_path: Path) -> None:
    """Every number of the files stands on the page bit for bit, over steps, tokens and hours."""
    held_out = {2: {"val/held/bpb@1k": 1 / 3, "val/held/bpb@8k": 0.3, "val/held/perplexity@1k": 9.0, "time/val": 36.0}}
    a = make_run("a", [record(step, **held_out.get(step, {})) for step in range(1, 7)])
    b = make_run("b", [record(step, loss__mean=None if step == 2 else 0.1 * step) for step in range(1, 4)])
    page = tmp_path / "report.html"
    assert run_plot([str(a), str(b), "--output", str(page)]) == 0
    report = report_of(page)
    assert (report["runs"], report["refresh"]) == (["a", "b"], None)
    cards = cards_of(report)
    loss = curve_of(cards["Training loss, nats per token"], run=0)
    assert loss["step"] == [1, 2, 3, 4, 5, 6]
    assert loss["y"] == [5.0 - step / 8 for step in range(1, 7)]
    assert loss["tokens"] == [2048.0 * step for step in range(1, 7)]
    # A step takes a thousandth of an hour here, the validation at step 2 ten of them.
    assert loss["hours"] == pytest.approx([0.001, 0.012, 0.013, 0.014, 0.015, 0.016])
    other = curve_of(cards["Training loss, nats per token"], run=1)["y"]
    assert other[0] == 0.1 and np.isnan(other[1]) and other[2] == 0.1 * 3
    card = cards["Held-out held, bits per byte"]
    assert card["variants"] == ["@1k", "@8k"]
    assert curve_of(card, run=0, variant=0)["y"] == [1 / 3]
    assert curve_of(card, run=0, variant=1) == {"step": [2], "tokens": [4096.0], "hours": [0.012], "y": [0.3]}
    assert {"Learning rate, ", "Gradient norm, before clipping", "Throughput, tokens/s", "Step, s"} <= cards.keys()
    # Perplexity is the loss once more; no run skipped an update; nothing measured utilisation.
    assert not [title for title in cards if "perplexity" in title or "Skipped" in title or "FLOPs" in title]


def test_metrics_of_no_card_of_their_own(make_run: Callable, record: Callable, tmp_path: Path) -> None:
    records = [record(step, **{"optim/grad_norm/mlp": 2.0, "max_vio/mean": 3.0}) for step in (1, 2)]
    page = tmp_path / "report.html"
    run_plot([str(make_run("a", records)), "--output", str(page)])
    folded = {section["title"]: section for section in report_of(page)["sections"] if section["folded"]}
    assert [card["title"] for card in folded["Gradient norm by group"]["cards"]] == ["mlp"]
    assert [card["title"] for card in folded["Other metrics"]["cards"]] == ["max_vio/mean"]


def test_skipped_steps_and_spikes_are_marked(make_run: Callable, record: Callable, tmp_path: Path) -> None:
    """A skipped step at the height of the last finite loss; neighbouring spikes as one, at their highest."""
    changes = {
        3: {"loss__mean": None, "optim__skipped_steps": 1},
        4: {"optim__skipped_steps": 1},
        5: {"loss__spike": 7.0, "optim__skipped_steps": 1},
        6: {"loss__spike": 9.0, "loss__mean": 8.0, "optim__skipped_steps": 1},
    }
    page = tmp_path / "report.html"
    run_plot([str(make_run("a", [record(s, **changes.get(s, {})) for s in range(1, 7)])), "--output", str(page)])
    cards = cards_of(report_of(page))
    loss = cards["Training loss, nats per token"]
    skipped, spike = curve_of(loss, 0, "skipped"), curve_of(loss, 0, "spike")
    assert (skipped["step"], skipped["y"]) == ([3], [4.75])
    assert (spike["step"], spike["y"]) == ([6], [8.0])
    assert curve_of(cards["Skipped updates, steps so far"], 0)["y"] == [0, 0, 1, 1, 1, 1]


def test_long_runs_are_thinned_and_keep_their_spikes(make_run: Callable, tmp_path: Path) -> None:
    records = [{"step": s, "loss/mean": 2.0 + s % 7 / 100, "time/step": 1.0} for s in range(1, 5001)]
    records[3210]["loss/mean"], records[4444]["loss/mean"] = 99.0, 0.25
    page = tmp_path / "report.html"
    run_plot([str(make_run("long", records)), "--output", str(page)])
    loss = curve_of(cards_of(report_of(page))["Training loss, nats per token"], 0)
    assert 1000 < len(loss["step"]) <= 2000
    assert (max(loss["y"]), loss["step"][loss["y"].index(99.0)]) == (99.0, 3211)
    assert (min(loss["y"]), loss["step"][loss["y"].index(0.25)]) == (0.25, 4445)
    assert (loss["step"][0], loss["step"][-1]) == (1, 5000)
    assert "Long curves are thinned for display" in page.read_text()


def test_thin_keeps_ends_extremes_and_gaps() -> None:
    values = np.sin(np.arange(100_001) / 500)
    values[70_000:72_000] = np.nan
    values[5] = 4.0
    kept = thin(values, 1000)
    assert len(kept) <= 1000
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1], 5 in kept) == (0, 100_000, True)
    assert np.nanmin(values[kept]) == np.nanmin(values)
    assert np.isnan(values[kept]).any()
    assert thin(values[:10], 10).tolist() == list(range(10))


def test_points_are_shared_out_within_the_budget() -> None:
    assert points_each([10, 5000, 5000], budget=2010, most=2000) == 1000
    assert points_each([10, 20], budget=100, most=2000) == 2000
    assert points_each([100] * 1000, budget=50, most=2000) == 4
    # Three float64 and one int32 a point, in base64.
    assert POINT_BUDGET * (3 * 8 + 4) * 4 / 3 + len(get_plotlyjs()) < 14.5e6


def test_smooth_is_the_weighted_mean_of_what_came_before() -> None:
    values = np.array([4.0, np.nan, 1.0, 7.0])
    # Weights 1/2 per point of age with span 2.
    assert smooth(values, 2).tolist()[0::2] == [4.0, (4 / 2 + 1) / 1.5]
    assert np.isnan(smooth(values, 2)[1])
    assert smooth(values, 2)[3] == pytest.approx((4 / 4 + 1 / 2 + 7) / 1.75)


def test_tables_of_numbers_and_settings(make_run: Callable, record: Callable, tmp_path: Path) -> None:
    a = make_run("a", [record(step) for step in range(1, 7)])
    b = make_run("b", [record(step) for step in range(1, 4)], {"optim": {"lr": 0.001}, "model": {"name": "h/x"}})
    page = tmp_path / "report.html"
    run_plot([str(a), str(b), "--output", str(page)])
    text = re.sub(r"<[^>]+>", " ", page.read_text().partition("<header>")[2].partition("<script")[0])
    words = " ".join(text.split())
    assert "a finished 6 / 6 12.3k 4.2500" in words
    assert "b stopped 3 / 6 6.14k 4.6250" in words
    different = words.partition("Settings that differ")[2].partition("All settings")[0]
    assert different.split() == [
        "Setting",
        "a",
        "b",
        "optim.lr",
        "0.003",
        "0.001",
        "model.name",
        "null",
        "&quot;h/x&quot;",
    ]
    run_plot([str(a), "--output", str(page)])
    words = " ".join(re.sub(r"<[^>]+>", " ", page.read_text().partition("<script")[0]).split())
    assert "optim.lr 0.003" in words.partition("Settings")[2].partition("All settings")[0]


def test_names_and_values_are_inert(make_run: Callable, record: Callable, tmp_path: Path) -> None:
    """Markup in the name of a run, of a metric or in the config stays text; secrets do not reach the page."""
    bad = "<img src=x onerror=alert(1)>"
    config = {"model": {"name": "</script><script>alert(2)</script>", "api_key": "sk-secret"}, "u": "http://me:pw@h/"}
    run = make_run(bad, [record(1, **{f"val/{bad}/bpb@1k": 1.0, "</script><b>": 2.0})], config)
    page = tmp_path / "report.html"
    run_plot([str(run), "--output", str(page)])
    text = page.read_text()
    ours = text.partition("<script>")[0]
    assert "<img" not in text and "<script>alert" not in text and "<b>" not in ours
    assert "&lt;img src=x onerror=alert(1)&gt;" in ours
    assert "sk-secret" not in text and "me:pw" not in text
    report = report_of(page)
    assert report["runs"] == [bad]
    assert f"Held-out {bad}, bits per byte" in cards_of(report)
    assert "default-src 'none'; script-src 'sha256-" in text


def test_faults_have_a_message_and_exit_code(
    make_run: Callable, record: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, empty = make_run("a", [record(1)]), make_run("empty", "")
    torn = make_run("torn", '{"step": 1}\n{]\n')
    blocked = tmp_path / "blocked.html"
    blocked.with_name("blocked.html.new").mkdir()
    (tmp_path / "folder.html").mkdir()
    fine = ["--output", str(tmp_path / "report.html")]
    for arguments, code, message in (
        ([empty, *fine], 2, "there is no whole record yet in"),
        ([torn, *fine], 2, f"{torn}/metrics.jsonl, line 2 is damaged"),
        ([run, run, *fine], 2, "is given twice"),
        ([tmp_path / "none", *fine], 2, "there is no folder"),
        ([run, "--output", tmp_path / "model.py"], 2, "give it a name that ends in .html"),
        ([run, "--output", tmp_path / "folder.html"], 2, "is a folder"),
        ([run, "--output", tmp_path / "none" / "x.html"], 2, "there is no folder"),
        ([run, "--output", blocked], 1, f"the page {blocked} cannot be written"),
        ([run, "--interval", "0"], 2, "must be above 0"),
    ):
        assert run_plot([str(argument) for argument in arguments]) == code, message
        assert message in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_scores_that_came_late_lie_on_rising_curves(make_run: Callable, record: Callable, tmp_path: Path) -> None:
    """`eval-worker` writes the newest snapshot's line first, when training has gone on; of a step that was scored again
    the last value counts. Its time is not that of the run."""
    late = [{"step": step, "val/held/bpb@1k": 3.0 - step / 8, "time/eval": 36.0} for step in (6, 2, 4)]
    lines = [*map(record, range(1, 6)), {"step": 4, "val/held/bpb@1k": 9.0}, *late[:1], record(6), *late[1:]]
    run, page = make_run("run", lines), tmp_path / "report.html"
    assert run_plot([str(run), "--output", str(page)]) == 0
    cards = cards_of(report_of(page))
    curve = curve_of(cards["Held-out held, bits per byte"], run=0)
    assert (curve["step"], curve["y"]) == ([2, 4, 6], [2.75, 2.5, 2.25])
    assert curve["hours"] == pytest.approx([0.002, 0.004, 0.006])
    assert curve_of(cards["Scoring beside the run, s a round"], run=0)["step"] == [2, 4, 6]
    assert "<td>6 / 6</td>" in page.read_text() and '<td><span class="state finished">' in page.read_text()
    assert "<th>held bpb@1k</th>" in page.read_text() and "<td>2.2500</td>" in page.read_text()


def test_a_model_that_was_only_scored(make_run: Callable, tmp_path: Path) -> None:
    """A set may have the name of a metric: `acc` is the accuracy all the same."""
    record = {"step": 400, "val/acc/loss@1k": 2.5, "val/acc/acc@1k": 0.25, "val/acc/perplexity@1k": 12.0}
    run, page = make_run("run", [record], {"max_steps": 0}), tmp_path / "report.html"
    assert run_plot([str(run), "--output", str(page)]) == 0
    text = page.read_text()
    assert '<td><span class="state finished">finished</span></td><td>400</td><td>0.2500</td></tr>' in text
    assert curve_of(cards_of(report_of(page))["Held-out acc, accuracy"], run=0)["y"] == [0.25]
