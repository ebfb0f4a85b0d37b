"""`sft --max-steps 0`: a finished run is scored through the real command, into its own record or elsewhere."""

import shutil

import pytest

from configs.launch import RUN_CONFIG
from trainer.reports.compare import run_compare
from trainer.reports.plot import run_plot


def scores(record):
    return {name: value for name, value in record.items() if name.startswith("val/")}


def test_another_run_is_scored_by_two_ranks(runner, reference, answer_of):
    """Without its training data, at an older step: the numbers of the run's own round, and a run that reports read."""
    config = runner.config("scored")
    before = {path: path.stat().st_mtime_ns for path in reference.dir.rglob("*")}
    scored = runner.run(
        config,
        *("--max-steps", "0", "--resume.dir", reference.dir, "--resume.step", "10"),
        *("--data.paths", runner.folder / "gone", "--val.micro-batch-tokens", "128"),
        ranks=2,
    )
    assert "steps of" not in scored.output
    assert "scored by 2 workers on\nplan:   held, in windows of 32 and 64 tokens\n" in scored.output
    assert "step 10 | val held @32 | loss " in scored.output
    assert list(scored.metrics) == [10]
    assert scores(scored.metrics[10]) == pytest.approx(scores(reference.metrics[10]), rel=1e-6)
    assert sorted(path.name for path in scored.dir.iterdir()) == [".lock", "configs", "logs", "metrics.jsonl"]
    assert {path: path.stat().st_mtime_ns for path in reference.dir.rglob("*")} == before

    compared = answer_of(run_compare, reference.dir, scored.dir)
    assert compared.code == 1, compared.err  # they differ
    assert "val/held/bpb@64" in compared.out
    page = runner.folder / "scored.html"
    assert answer_of(run_plot, scored.dir, "--output", page).code == 0
    assert "val/held/bpb@64" in page.read_text()


def test_a_run_is_scored_in_its_own_record(runner, reference):
    own = runner.folder / "own"
    shutil.copytree(reference.dir, own, symlinks=True)
    lines = (own / "metrics.jsonl").read_text().splitlines()
    config = (own / RUN_CONFIG).read_bytes()
    scored = runner.run(runner.config("own"), "--max-steps", "0", "--resume.step", "10")
    assert (own / "metrics.jsonl").read_text().splitlines()[: len(lines)] == lines
    assert scores(scored.metrics[10]) == scores(reference.metrics[10])
    assert scored.metrics[20] == reference.metrics[20]
    assert (own / RUN_CONFIG).read_bytes() == config
    assert (own / "logs" / "latest").readlink().name == "attempt_1"
    assert "done: scored in" in scored.output
