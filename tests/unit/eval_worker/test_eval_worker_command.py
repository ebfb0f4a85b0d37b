"""`eval-worker` before anything is started or claimed: what it waits for, and what it refuses."""

import json
import socket
from pathlib import Path

import pytest

from configs.checkpoint import ResumeConfig
from configs.errors import ConfigError
from configs.eval_worker import EvalWorkerConfig
from configs.launch import RUN_CONFIG
from trainer.eval_worker.attempt import open_attempt
from trainer.eval_worker.command import run_eval_worker
from trainer.eval_worker.training import find_training
from trainer.run_dir import check_run_dir


def change_config(run_dir: Path, **changes: object) -> None:
    """The run was gone on with, with the same config but for `changes`."""
    path = run_dir / RUN_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_it_waits_for_a_run_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written meanwhile: the run would find its directory used. A dry run is no start."""
    run_dir = tmp_path / "one"
    (run_dir / "configs").mkdir(parents=True)
    (run_dir / "configs" / "sft.json").write_text("{}")
    code = run_eval_worker(["--run-dir", str(run_dir), "--poll-seconds", "0.01", "--max-idle-minutes", "0.001"])
    output = capsys.readouterr()
    assert code == 1
    assert output.out == f"waiting for a training run to start in {run_dir}: there is none yet (Ctrl-C ends)\n"
    assert output.err == f"no training run was started in {run_dir} within max_idle_minutes = 0.001\n"
    assert [path.name for path in run_dir.rglob("*")] == ["configs", "sft.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--val.sets", "held"], "val.sets (flag --val.sets): 'held' is a name in data_dir, which is not set"),
        (["--val.sets", '{"name": "a", "path": "nowhere"}'], "val.sets (flag --val.sets): nowhere"),
        (["--poll-seconds", "900"], "poll_seconds (flag --poll-seconds): 900 is not less than deployment.timeout_sec"),
        (["--poll", "1"], "poll"),
    ],
)
def test_faults_of_its_config_are_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run_eval_worker(["--run-dir", str(tmp_path / "none"), *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.count("\n") == 1 and output.out == ""


def test_a_file_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one").touch()
    assert run_eval_worker(["--run-dir", str(tmp_path / "one")]) == 2
    assert capsys.readouterr().err == f"run_dir (flag --run-dir): {tmp_path / 'one'} is not a folder\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"old_table": 1}', "is no config of this version of the program (data: Field required)"),
        ("{", "is no config of this version of the program (Invalid JSON: "),
    ],
)
def test_a_config_that_cannot_be_read_is_named(bench, content: str, message: str) -> None:
    (bench.run_dir / RUN_CONFIG).write_text(content)
    with pytest.raises(ConfigError) as error:
        find_training(bench.run_dir)
    (fault,) = error.value.faults
    assert fault.key == "run_dir" and message in fault.message and "configs/sft.json" in fault.message


def test_a_run_without_snapshots_is_refused(bench, capsys: pytest.CaptureFixture[str]) -> None:
    change_config(bench.run_dir, eval_snapshots=None)
    assert run_eval_worker(["--run-dir", str(bench.run_dir)]) == 2
    assert "has no [eval_snapshots], so there will be nothing to score" in capsys.readouterr().err


def test_without_a_suite_anywhere_it_says_so(bench, capsys: pytest.CaptureFixture[str]) -> None:
    change_config(bench.run_dir, val=None)
    assert run_eval_worker(["--run-dir", str(bench.run_dir)]) == 2
    assert capsys.readouterr().err.startswith("val: is missing: neither this command nor the run's own config says")


def test_a_bad_set_is_refused_before_anything_is_claimed(
    bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text('{"question": "ba"}\n')
    sets = json.dumps({"name": "odd", "path": str(path)})
    arguments = ["--val.sets", sets, "--val.seq-lens", "16"]
    assert run_eval_worker(["--run-dir", str(bench.run_dir), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("val.sets (flag --val.sets): ") and "odd.jsonl" in error and "question" in error
    assert bench.snapshots() == ["final.json", "step_2", "step_4", "step_6"]
    assert not (bench.run_dir / "eval_worker").exists()


def test_a_second_worker_is_refused_and_told_of_the_first(bench, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = open_attempt(EvalWorkerConfig(run_dir=bench.run_dir), bench.training, print)
    try:
        assert run_eval_worker(["--run-dir", str(bench.run_dir)]) == 2
        holder = (bench.run_dir / "eval_worker" / ".lock").read_text().strip()
        assert holder.endswith(f" on {socket.gethostname()}")
        folder = bench.run_dir / "eval_worker"
        assert capsys.readouterr().err == (
            f"run_dir (flag --run-dir): {folder} is in use by an eval-worker that has not ended ({holder})\n"
        )
        # Nor is the run deleted from under it, though it may be gone on with.
        training = bench.training.model_copy(update={"output_dir": bench.run_dir.parent})
        clean = training.model_copy(update={"clean": True})
        with pytest.raises(ConfigError, match=r"clean: .*in use by an eval-worker"):
            check_run_dir(clean)
        check_run_dir(training.model_copy(update={"resume": ResumeConfig()}))
    finally:
        attempt.close()
    check_run_dir(clean)
