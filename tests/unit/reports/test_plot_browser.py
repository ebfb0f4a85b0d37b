"""The page in a real browser: everything is drawn, nothing is asked of a network, nothing of a run becomes markup."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.reports.plot import run_plot

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="needs chromium, chromium-browser or google-chrome")
def test_page_in_a_browser(make_run: Callable, record: Callable, tmp_path: Path) -> None:
    bad = "<img src=x onerror=document.title='owned'>"
    held_out = {"val/held/bpb@1k": 1.0, "val/held/bpb@8k": 0.9, f"val/{bad}/acc@1k": 0.5}
    records = [record(step, **(held_out if step % 2 == 0 else {})) for step in range(1, 7)]
    changed = [
        record(step, loss__mean=None if step == 3 else 2.0, optim__skipped_steps=step >= 3) for step in (1, 2, 3, 4)
    ]
    runs = [make_run("first", records), make_run(bad, changed, {"model": {"name": f"</script>{bad}"}})]
    page = tmp_path / "report.html"
    assert run_plot([*map(str, runs), "--output", str(page)]) == 0
    assert BROWSER is not None
    result = subprocess.run(
        [
            BROWSER,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
            # Whatever asks for a host finds none, and says so on the console, as does the page's content policy.
            *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr"),
            *("--window-size=1400,2000", "--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'browser'}"),
            *("--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert [line for line in result.stderr.splitlines() if "CONSOLE" in line] == []
    dom = re.sub(r"<script.*?</script>", "", result.stdout, flags=re.DOTALL)
    assert re.findall(r"<title>(.*?)</title>", dom) == ["first, &lt;img src=x onerror=document.title='owned'&gt;"]
    plots = dict(re.findall(r'<article class="card[^"]*"><h3><b>(.*?)</b>.*?</h3>(.*?)</article>', dom, re.DOTALL))
    assert list(plots) == [
        "Training loss",
        "Held-out held",
        "Held-out &lt;img src=x onerror=document.title='owned'&gt;",
        "Learning rate",
        "Gradient norm",
        "Skipped updates",
        "Throughput",
        "Step",
    ]
    traces = {title: len(re.findall(r'<g class="trace scatter', plot)) for title, plot in plots.items()}
    # Raw and smooth of two runs, and the mark of the skipped step; two window lengths of one run; one curve a run.
    assert traces["Training loss"] == 5
    assert traces["Held-out held"] == 2
    assert traces["Learning rate"] == 2
    assert "<img" not in dom
    for text in ("x axis", "tokens", "hours", "smooth"):
        assert text in dom.partition('<nav id="controls"')[2].partition("</nav>")[0]
