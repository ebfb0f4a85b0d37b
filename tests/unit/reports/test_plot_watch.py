"""`plot-runs --watch`: the page follows runs until they end or somebody stops it, and is whole at every moment."""

import fcntl
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.attempts import is_in_use
from trainer.reports import plot
from trainer.reports.plot import run_plot


def page_of(path: Path) -> tuple[list[int], float | None, list[str]]:
    """Number of steps of each loss curve, seconds to the next load, states; of a page that must be whole."""
    text = path.read_text()
    assert text.startswith("<!doctype html>") and text.endswith("</html>\n")
    found = re.search(r'<script id="report" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    report = json.loads(found[1])
    curves = [curve for section in report["sections"][:1] for curve in section["cards"][0]["curves"]]
    # int32 as base64
    points = [len(curve["x"]["step"]["bdata"]) * 3 // 16 for curve in curves if curve["kind"] == "raw"]
    return points, report["refresh"], re.findall(r'<span class="state (\w+)">', text)


def test_watch_follows_a_run_to_its_end(
    make_run: Callable, record: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = make_run("ended", [record(step) for step in range(1, 7)])
    going = make_run("going", "", {"max_steps": 24})
    page = tmp_path / "report.html"
    seen = []
    with (going / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)

        def sleep(seconds: float) -> None:
            """Between two writings: the run does three steps, the third time it ends."""
            seen.append((seconds, *page_of(page)))
            done = 3 * (len(seen) - 1)
            with (going / "metrics.jsonl").open("a") as file:
                file.writelines(json.dumps(record(done + step)) + "\n" for step in (1, 2, 3))
            if len(seen) == 3:
                lock.close()

        monkeypatch.setattr(plot.time, "sleep", sleep)
        assert run_plot([str(ended), str(going), "--watch", "--interval", "2", "--output", str(page)]) == 0
    assert [entry[0] for entry in seen] == [2, 2, 2]
    assert [len(entry[1]) for entry in seen] == [1, 2, 2]
    assert [entry[2] for entry in seen] == [2, 2, 2]
    assert all(entry[3] == ["finished", "running"] for entry in seen)
    assert page_of(page) == ([6, 9], None, ["finished", "stopped"])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("report")] == ["report.html"]


def test_ctrl_c_ends_watching_with_a_final_page(
    make_run: Callable, record: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    run = make_run("run", [record(1)])
    page = tmp_path / "report.html"
    monkeypatch.setattr(plot.time, "sleep", interrupted)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert run_plot([str(run), "--watch", "--output", str(page)]) == 0
    assert page_of(page) == ([1], None, ["running"])


def test_a_page_that_cannot_be_replaced_stays(make_run: Callable, record: Callable, tmp_path: Path) -> None:
    run, page = make_run("run", [record(1)]), tmp_path / "report.html"
    page.write_text("old")
    page.with_name("report.html.new").mkdir()
    assert run_plot([str(run), "--output", str(page)]) == 1
    assert page.read_text() == "old"


def test_whether_a_run_is_in_use(tmp_path: Path) -> None:
    assert is_in_use(tmp_path) is False
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert is_in_use(tmp_path) is True
    assert is_in_use(tmp_path) is False


def test_a_failed_run_is_called_so(make_run: Callable, record: Callable, tmp_path: Path) -> None:
    run, page = make_run("run", [record(1)]), tmp_path / "report.html"
    (run / "logs" / "latest").mkdir(parents=True)
    (run / "logs" / "latest" / "rank_1.error.json").write_text("{}")
    run_plot([str(run), "--output", str(page)])
    assert page_of(page)[2] == ["failed"]


def test_watch_goes_on_while_a_finished_run_is_scored(
    make_run: Callable, record: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("run", [record(step) for step in range(1, 7)])
    page, seen = tmp_path / "report.html", []
    (run / "eval_worker").mkdir()
    with (run / "eval_worker" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)

        def sleep(seconds: float) -> None:
            """The worker scores the last snapshot and ends."""
            seen.append(page_of(page))
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 6, "val/held/bpb@1k": 2.125}\n')
            lock.close()

        monkeypatch.setattr(plot.time, "sleep", sleep)
        assert run_plot([str(run), "--watch", "--output", str(page)]) == 0
    assert seen == [([6], 5.0, ["finished"])]
    assert page_of(page) == ([6], None, ["finished"]) and "<td>2.1250</td>" in page.read_text()
