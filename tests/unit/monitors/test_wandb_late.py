"""Late results in wandb: one run for two processes where that can be, else a run beside it."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

wandb = pytest.importorskip("wandb", reason="wandb is not installed on the GPU machine")

from configs.sft import SFTConfig  # noqa: E402
from trainer.monitors import build_monitors, open_eval_monitors  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_login")


def config_of(mode: str = "online", **tables: Any) -> SFTConfig:
    values = {"data": {"type": "fake"}, "run": {"name": "one"}, "monitors": {"wandb": {"mode": mode, "group": "g"}}}
    return SFTConfig.model_validate(values | tables)


WORKER = """
import sys
from pathlib import Path

from configs.sft import SFTConfig
from trainer.monitors import open_eval_monitors

late = open_eval_monitors(SFTConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
late.log(4, {"val/a/bpb@1k": 2.5, "time/eval": 1.0})
late.log(2, {"val/a/bpb@1k": 3.0})
late.close()
"""


def definitions(server: Any, run_id: str) -> list[dict[str, Any]]:
    """What the run's last word on its metrics was: names, patterns and the axis of each."""
    configs = [json.loads(upsert["config"]) for upsert in server.upserts if upsert["name"] == run_id]
    return [config["_wandb"]["value"]["m"] for config in configs][-1]


def test_the_worker_logs_into_the_living_run_of_the_training(server: Any, tmp_path: Path) -> None:
    """Both in wandb's mode "shared"; the step is a metric and everybody's axis. The worker does not end the run."""
    config = config_of(eval_snapshots={"interval": 2})
    training = build_monitors(config, tmp_path, start_step=0, total_steps=9, wandb_id=None)
    assert training.wandb_id is not None and training.wandb_id.endswith("-shared")
    training.log(1, {"loss/mean": 1.0})
    # Another process, as it is: one shares wandb's service between all of its runs.
    env = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    arguments = [config.model_dump_json(), str(tmp_path), training.wandb_id]
    subprocess.run([sys.executable, "-c", WORKER, *arguments], env=env, check=True)
    assert server.ends == []
    training.log(5, {"loss/mean": 0.5})
    training.close()

    run_id = training.wandb_id
    assert server.ends == [run_id] and server.shared == {run_id}
    rows = [(row.pop("step"), row) for name, row in server.history if name == run_id]
    assert sorted(rows, key=lambda row: row[0]) == [
        (1, {"loss/mean": 1.0}),
        (2, {"val/a/bpb@1k": 3.0}),
        (4, {"val/a/bpb@1k": 2.5, "time/eval": 1.0}),
        (5, {"loss/mean": 0.5}),
    ]
    # "1" is a name, "2" a pattern, "5" the number of the metric that is its axis: wandb's own keys.
    step, others = definitions(server, run_id)[:2]
    assert step["1"] == "step" and others["2"] == "*" and others["5"] == 1
    assert {upsert["name"] for upsert in server.upserts} == {run_id}


def test_a_resumed_shared_run_stays_shared_and_repeats_no_step(server: Any, tmp_path: Path) -> None:
    """Also without the table now: the server takes the mode from the run's first process."""
    first = build_monitors(
        config_of(eval_snapshots={"interval": 2}), tmp_path, start_step=0, total_steps=9, wandb_id=None
    )
    for step in (1, 2, 3):
        first.log(step, {"loss/mean": 1.0})
    first.close()
    second = build_monitors(config_of(resume={}), tmp_path, start_step=1, total_steps=9, wandb_id=first.wandb_id)
    for step in (2, 3, 4):
        second.log(step, {"loss/mean": 0.5})
    second.close()
    assert second.wandb_id == first.wandb_id and server.shared == {first.wandb_id}
    assert [(row["step"], row["loss/mean"]) for _, row in server.history] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 0.5)]


def test_a_run_that_one_process_may_log_to_gets_another_beside_it(server: Any, tmp_path: Path) -> None:
    """The training was started without [eval_snapshots], or a checkpoint of it is scored."""
    run_dir = tmp_path / "brave"
    run_dir.mkdir()
    training = build_monitors(config_of(), run_dir, start_step=0, total_steps=9, wandb_id=None)
    training.log(5, {"loss/mean": 1.0})
    training.close()
    for step in (4, 2):
        late = open_eval_monitors(config_of(), run_dir, training.wandb_id)
        late.log(step, {"val/a/bpb@1k": step / 2})
        late.close()
    beside = f"{training.wandb_id}-eval"
    assert server.shared == set()
    assert [row for row in server.history if row[0] == training.wandb_id] == [(training.wandb_id, {"loss/mean": 1.0})]
    assert [row for row in server.history if row[0] == beside] == [
        (beside, {"step": 4, "val/a/bpb@1k": 2.0}),
        (beside, {"step": 2, "val/a/bpb@1k": 1.0}),
    ]
    (shown,) = {
        (up["displayName"], up["groupName"]) for up in server.upserts if up["name"] == beside and up["displayName"]
    }
    assert shown == ("brave-eval", "g")


def test_offline_results_lie_beside_too(tmp_path: Path) -> None:
    late = open_eval_monitors(config_of("offline", eval_snapshots={"interval": 2}), tmp_path, "abc")
    late.log(2, {"val/a/bpb@1k": 1.0})
    late.close()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert folder.name.endswith("-abc-eval")


def test_wandb_that_fails_does_not_keep_results_from_being_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def init(**arguments: Any) -> None:
        raise wandb.errors.CommError("no network")

    monkeypatch.setattr(wandb, "init", init)
    late = open_eval_monitors(config_of(), tmp_path, "abc-shared")
    late.log(2, {"val/a/bpb@1k": 1.0})
    late.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 2, "val/a/bpb@1k": 1.0}
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith("wandb cannot start, the run goes on without it: no network")


def test_an_id_that_was_never_given_to_a_run_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run without a wandb run so far: a later resume would look for one that never was."""

    def init(**arguments: Any) -> None:
        raise wandb.errors.CommError("no network")

    monkeypatch.setattr(wandb, "init", init)
    config = config_of(eval_snapshots={"interval": 2}, resume={})
    monitors = build_monitors(config, tmp_path, start_step=0, total_steps=9, wandb_id=None)
    assert monitors.wandb_id is None
    monitors.close()
