"""`compare-runs`: the first step at which two runs differ, in what, and the exit code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.reports.compare import run_compare

STEPS = range(1, 7)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, dict]:
    code = run_compare([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_equal_runs(make_run: Callable, record: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a run lies and how it was started last is no difference."""
    records = [record(step, digest__params=f"{step}" * 16) for step in STEPS]
    a = make_run("a", records)
    b = make_run("b", records, {"output_dir": "elsewhere", "run": {"name": "b"}, "clean": True, "resume": {"step": 3}})
    assert run_compare([str(a), str(b)]) == 0
    output = capsys.readouterr().out
    assert "config: the same" in output
    assert "steps: no difference in what both runs have on record" in output
    assert "\x1b" not in output
    code, value = as_json(capsys, a, b)
    assert (code, value["equal"], value["first_difference"], value["config"]) == (0, True, None, {})
    assert value["metrics"]["digest/params"]["steps_compared"] == 6


def test_first_difference_names_step_metrics_and_all_digits(
    make_run: Callable, record: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    a = make_run("a", [record(step) for step in STEPS])
    changes = {4: {"loss__mean": 4.5 + 2**-50}, 5: {"digest__rows": "f" * 16}}
    b = make_run("b", [record(step, **changes.get(step, {})) for step in STEPS])
    assert run_compare([str(a), str(b)]) == 1
    output = capsys.readouterr().out
    assert "step 4 is the first to differ, in: loss\n" in output
    assert "4.5  4.500000000000001  2.0e-16" in output
    assert "the rows are the same up to here, the loss is not" in output
    _, value = as_json(capsys, a, b)
    assert value["first_difference"] == {"step": 4, "metrics": {"loss/mean": {"a": 4.5, "b": 4.5 + 2**-50}}}
    assert value["metrics"]["digest/rows"] == {
        "steps_compared": 6,
        "steps_different": 1,
        "first_step": 5,
        "counts": True,
        "only": None,
    }


@pytest.mark.parametrize(
    ("name", "value", "label", "meaning"),
    [
        ("digest__rows", "0" * 16, "row digest", "other rows: the data, its order or the batch is not the same"),
        ("optim__grad_norm", 9.0, "gradient norm", "rows and loss are the same up to here, the gradient is not"),
        ("optim__lr", 9.0, "learning rate", "the learning rate is not"),
        ("digest__params", "0" * 16, "parameter checksum", "the update is not"),
    ],
)
def test_each_metric_is_named(
    make_run: Callable, record: Callable, capsys: pytest.CaptureFixture, name: str, value: Any, label: str, meaning: str
) -> None:
    same = {"digest__params": "a" * 16}
    a = make_run("a", [record(step, **same) for step in STEPS])
    b = make_run("b", [record(step, **(same | {name: value} if step >= 3 else same)) for step in STEPS])
    assert run_compare([str(a), str(b)]) == 1
    output = capsys.readouterr().out
    assert f"step 3 is the first to differ, in: {label}\n" in output
    assert meaning in output


def test_config_differences_by_full_key(
    make_run: Callable, record: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record(step) for step in STEPS]
    a = make_run("a", records)
    b = make_run("b", records, {"optim": {"lr": 0.001, "eps": 1e-8, "new": None}})
    assert run_compare([str(a), str(b)]) == 1
    output = capsys.readouterr().out
    assert "config: 2 keys differ" in output
    assert "  optim.lr   0.003     0.001\n" in output
    assert "  optim.eps  (absent)  1e-08\n" in output
    _, value = as_json(capsys, a, b)
    assert value["config"] == {"optim.lr": {"a": 0.003, "b": 0.001}, "optim.eps": {"b": 1e-8}}
    assert as_json(capsys, a, b, "--no-config")[0] == 0


def test_rtol_is_for_numbers(make_run: Callable, record: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights within a tolerance have other checksums: these are shown and do not count. Rows must be equal."""
    a = make_run("a", [record(step, loss__mean=1.0, digest__params="a" * 16) for step in STEPS])
    b = make_run("b", [record(step, loss__mean=1.001, digest__params="b" * 16) for step in STEPS])
    assert run_compare([str(a), str(b)]) == 1
    capsys.readouterr()
    code, value = as_json(capsys, a, b, "--rtol", "1e-3")
    assert (code, value["equal"], value["metrics"]["digest/params"]["counts"]) == (0, True, False)
    assert value["metrics"]["digest/params"]["steps_different"] == 6
    assert as_json(capsys, a, b, "--rtol", "9e-4")[0] == 1
    c = make_run("c", [record(step, loss__mean=1.0, digest__rows="c" * 16) for step in STEPS])
    assert as_json(capsys, a, c, "--rtol", "0.5")[1]["first_difference"]["metrics"].keys() == {"digest/rows"}


def test_lengths_and_checksum_intervals_may_differ(
    make_run: Callable, record: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what both have on record is compared; the rest is said."""
    a = make_run("a", [record(step, **({"digest__params": "a" * 16} if step % 2 == 0 else {})) for step in STEPS])
    b = make_run("b", [record(step, **({"digest__params": "a" * 16} if step % 3 == 0 else {})) for step in range(1, 4)])
    assert run_compare([str(a), str(b)]) == 0
    output = capsys.readouterr().out
    assert "A goes on to step 6: the steps after 3 are not compared" in output
    assert "parameter checksum      0          0  no step in common" in output
    c = make_run("c", [{"step": 1, "loss/mean": record(1)["loss/mean"]}])
    _, value = as_json(capsys, a, c)
    assert value["metrics"]["optim/grad_norm"]["only"] == "a"
    assert value["metrics"]["loss/mean"]["steps_compared"] == 1


def test_not_finite_equals_not_finite_only(
    make_run: Callable, record: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    a = make_run("a", [record(1, loss__mean=None), record(2, loss__mean=None)])
    b = make_run("b", [record(1, loss__mean=None), record(2)])
    assert as_json(capsys, a, a.parent / "a/../b")[1]["first_difference"] == {
        "step": 2,
        "metrics": {"loss/mean": {"a": None, "b": 4.75}},
    }
    assert run_compare([str(a), str(b)]) == 1
    assert "not finite  4.75" in capsys.readouterr().out


def test_table_of_held_out_metrics(make_run: Callable, record: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    """Final values side by side; at a common step they are compared like the rest."""
    a = make_run(
        "a", [record(step, **({"val/held/bpb@1k": 3.0 - step / 8} if step in (2, 6) else {})) for step in STEPS]
    )
    b = make_run("b", [record(step, **({"val/held/bpb@1k": 2.75} if step == 2 else {})) for step in STEPS])
    assert run_compare([str(a), str(b)]) == 0
    output = capsys.readouterr().out
    assert "val/held/bpb@1k                          2.25 @ step 6  2.75 @ step 2   +0.5\n" in output
    c = make_run("c", [record(step, **({"val/held/bpb@1k": 2.5} if step == 2 else {})) for step in STEPS])
    assert run_compare([str(b), str(c)]) == 1
    output = capsys.readouterr().out
    assert "step 2 is the first to differ, in: val/held/bpb@1k" in output
    assert "held-out, step 2     A    B  B - A\nval/held/bpb@1k   2.75  2.5  -0.25" in output
    assert as_json(capsys, a, b)[1]["held_out"] == {
        "val/held/bpb@1k": {"a": {"step": 6, "value": 2.25}, "b": {"step": 2, "value": 2.75}}
    }


def test_resumed_and_killed_runs(make_run: Callable, record: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line of a step counts, a line without its end does not."""
    text = "".join(json.dumps(record(step)) + "\n" for step in STEPS)
    a = make_run("a", text)
    b = make_run("b", json.dumps({"step": 1, "loss/mean": 77.0}) + "\n" + text + '{"step": 7, "loss/me')
    assert run_compare([str(a), str(b)]) == 0


def test_control_characters_and_secrets_do_not_reach_the_terminal(
    make_run: Callable, record: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    a = make_run("a", [record(1)], {"model": {"name": "\x1b[2J\u202e"}})
    b = make_run("b", [record(1)], {"model": {"name": "https://me:pass@host/x"}})
    run_compare([str(a), str(b)])
    output = capsys.readouterr().out
    assert "\x1b" not in output and "\u202e" not in output and "me:pass" not in output
    run_compare([str(a), str(b), "--json"])
    assert "me:pass" not in capsys.readouterr().out


def test_faults_have_a_message_and_exit_code_2(
    make_run: Callable, record: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = make_run("a", [record(1)])
    other = make_run("other", [record(2)])
    empty = make_run("empty", "")
    torn = make_run("torn", [record(1)])
    (torn / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n')
    (tmp_path / "plain").mkdir()
    unlogged = make_run("unlogged", "")
    (unlogged / "metrics.jsonl").unlink()
    for arguments, message in (
        ([], "runs: is missing"),
        ([a], "needs two run directories, got 1"),
        ([a, other, empty], "needs two run directories, got 3"),
        ([a, a], f"{a} is given twice"),
        ([a, tmp_path / "none"], f"there is no folder {tmp_path / 'none'}"),
        ([a, tmp_path / "plain"], "is no run directory: it holds no configs/sft.json"),
        ([a, tmp_path], f"{tmp_path} is no run directory but holds some: {a}, "),
        ([a, a / "metrics.jsonl"], "is a file: give the run directory"),
        ([a, empty], f"{empty}/metrics.jsonl has no whole record yet"),
        ([a, unlogged], f"{unlogged}/metrics.jsonl has no whole record yet"),
        ([a, torn], f"{torn}/metrics.jsonl, line 2 is damaged"),
        ([a, other], "have no step of a metric in common"),
        ([a, other, "--rtol", "2"], "must be below 1"),
    ):
        assert run_compare([str(argument) for argument in arguments]) == 2, message
        assert message in capsys.readouterr().err


def test_scores_that_came_late_are_compared_like_the_rest(
    make_run: Callable, record: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines of `eval-worker` and of `--max-steps 0` come out of order, newest snapshot first; the last one of a
    step counts."""
    trained = [record(step, **({"val/held/bpb@1k": 3.0 - step / 8} if step % 2 == 0 else {})) for step in STEPS]
    late = [{"step": step, "val/held/bpb@1k": 3.0 - step / 8, "time/eval": 2.0} for step in (6, 2, 4)]
    a = make_run("a", trained)
    b = make_run("b", [*map(record, STEPS), {"step": 4, "val/held/bpb@1k": 9.0}, *late])
    code, value = as_json(capsys, a, b)
    assert (code, value["metrics"]["val/held/bpb@1k"]["steps_compared"]) == (0, 3)
    assert value["held_out"]["val/held/bpb@1k"]["b"] == {"step": 6, "value": 2.25}
    assert value["runs"]["b"]["last_step"] == 6


def test_models_that_were_only_scored(make_run: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    """No step in common: their last values stand side by side, and nobody is told that they are equal."""
    scored = {"max_steps": 0}
    a = make_run("a", [{"step": 400, "val/held/bpb@1k": 2.5, "time/val": 3.0}], scored)
    b = make_run("b", [{"step": 800, "val/held/bpb@1k": 2.5, "time/val": 3.0}], scored)
    assert run_compare([str(a), str(b)]) == 1
    output = capsys.readouterr().out
    assert "  steps 400 to 400\n" in output and "  steps 800 to 800\n" in output
    assert "steps: none in common, only the last held-out values can be set side by side" in output
    assert "val/held/bpb@1k                          2.5 @ step 400  2.5 @ step 800     +0\n" in output
    assert as_json(capsys, a, b)[1]["equal"] is False
    c = make_run("c", [{"step": 400, "val/held/bpb@1k": 2.5}], scored)
    assert run_compare([str(a), str(c)]) == 0
