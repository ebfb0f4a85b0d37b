"""wandb: real offline runs, read back from their files, and failures that must not stop training."""

import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

wandb = pytest.importorskip("wandb", reason="wandb is not installed on the GPU machine")

from configs.errors import ConfigError  # noqa: E402
from configs.monitor import WandbConfig  # noqa: E402
from configs.sft import SFTConfig  # noqa: E402
from trainer.monitors import Monitors, build_monitors  # noqa: E402
from trainer.monitors.wandb import WandbMonitor  # noqa: E402
from trainer.monitors.wandb_run import without_secrets  # noqa: E402


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "trainer")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)


def config_of(mode: str = "offline") -> SFTConfig:
    return SFTConfig.model_validate(
        {
            "model": {"arch": {"model_type": "llama", "hidden_size": 64, "api_key": "do-not-send"}},
            "data": {"type": "fake", "seq_len": 16},
            "monitors": {"wandb": {"project": "tests", "mode": mode, "tags": ["a", "b"]}},
        }
    )


def open_monitors(
    run_dir: Path, *, start_step: int = 0, wandb_id: str | None = None, mode: str = "offline"
) -> Monitors:
    return build_monitors(config_of(mode), run_dir, start_step=start_step, total_steps=20, wandb_id=wandb_id)


def records(run_dir: Path) -> Iterator[Any]:
    """All records of all offline runs in the order of their start. The file is a LevelDB log of protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime_ns):
        data, position, body = path.read_bytes(), 7, b""
        while position + 7 <= len(data):
            if (room := 32768 - position % 32768) < 7:
                position += room
                continue
            _, length, kind = struct.unpack_from("<IHB", data, position)
            body += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):  # whole, or last part
                record = Record()
                record.ParseFromString(body)
                body = b""
                yield record


def history(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, metrics) as wandb got them."""
    rows = []
    for record in records(run_dir):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            rows.append((items["_step"], {name: value for name, value in items.items() if name[0] != "_"}))
    return rows


def run_ids(run_dir: Path) -> set[str]:
    return {record.run.run_id for record in records(run_dir) if record.WhichOneof("record_type") == "run"}


def steps_of(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_an_offline_run_has_numbers_name_and_config_without_secrets(tmp_path: Path) -> None:
    run_dir = tmp_path / "brave-run"
    run_dir.mkdir()
    monitors = open_monitors(run_dir)
    monitors.log(0, {"params/total": 12, "val/a/bpb@1k": 2.5})
    monitors.log(1, {"loss/mean": 0.5, "digest/rows": "00ff"})
    monitors.log(1, {"val/a/bpb@1k": 1.5})
    monitors.log(2, {"loss/mean": 0.25})
    monitors.close()

    # Two calls for one step are one row in wandb; text is not sent.
    assert history(run_dir) == [
        (0, {"params/total": 12, "val/a/bpb@1k": 2.5}),
        (1, {"loss/mean": 0.5, "val/a/bpb@1k": 1.5}),
        (2, {"loss/mean": 0.25}),
    ]
    (run,) = [record.run for record in records(run_dir) if record.WhichOneof("record_type") == "run"][:1]
    assert (run.project, run.display_name, list(run.tags)) == ("tests", "brave-run", ["a", "b"])
    sent = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert sent["data"]["seq_len"] == 16
    assert sent["model"]["arch"] == {"model_type": "llama", "hidden_size": 64, "api_key": "***"}
    assert b"do-not-send" not in b"".join(path.read_bytes() for path in run_dir.rglob("*") if path.is_file())


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path: Path) -> None:
    """Field case R117: resumed from a checkpoint older than what was logged, the wandb run keeps its id and its steps
    rise strictly; steps done again are held back, and metrics.jsonl has each once."""
    first = open_monitors(tmp_path)
    for step in range(1, 8):
        first.log(step, {"loss/mean": step / 10})
    first.close()
    assert first.wandb_id is not None

    second = open_monitors(tmp_path, start_step=4, wandb_id=first.wandb_id)
    assert second.wandb_id == first.wandb_id
    for step in range(5, 10):
        second.log(step, {"loss/mean": step / 10})
    second.close()

    assert run_ids(tmp_path) == {first.wandb_id}
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{first.wandb_id}*"))) == 2
    assert history(tmp_path) == [(step, {"loss/mean": step / 10}) for step in range(1, 10)]
    assert steps_of(tmp_path) == list(range(1, 10))


def test_without_an_id_a_new_wandb_run_is_opened(tmp_path: Path) -> None:
    """Also for a fork, whose first step is not 1."""
    ids = set()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        monitors = open_monitors(tmp_path / folder, start_step=4)
        monitors.log(5, {"loss/mean": 1.0})
        monitors.close()
        assert history(tmp_path / folder) == [(5, {"loss/mean": 1.0})]
        ids.add(monitors.wandb_id)
    assert len(ids) == 2
    assert None not in ids


def test_a_rewind_takes_metrics_jsonl_back_but_not_wandb(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitors = open_monitors(tmp_path)
    for step in (1, 2, 3):
        monitors.log(step, {"loss/mean": 1.0})
    monitors.rewind(1)
    assert steps_of(tmp_path) == [1]
    for step in (2, 3, 4):
        monitors.log(step, {"loss/mean": 2.0})
    monitors.close()
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert [(step, row["loss/mean"]) for step, row in history(tmp_path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    said = [record.getMessage() for record in caplog.records if "already" in record.getMessage()]
    assert said == ["wandb has the steps before 4 already; new values appear there from it on"]


def test_steps_must_not_fall(tmp_path: Path) -> None:
    monitors = build_monitors(
        config_of().model_copy(update={"monitors": config_of().monitors.model_copy(update={"wandb": None})}),
        tmp_path,
        start_step=4,
        total_steps=9,
        wandb_id=None,
    )
    assert monitors.wandb_id is None
    monitors.log(4, {"val/a/bpb@1k": 1.0})
    with pytest.raises(ValueError, match="metrics of step 3 after those of step 4"):
        monitors.log(3, {"loss/mean": 1.0})
    assert not (tmp_path / "wandb").exists()


class FakeRun:
    """Stands for an online run, which needs a server."""

    disabled = False
    url = "https://wandb.example/run"

    def __init__(self, run_id: str, starting_step: int) -> None:
        self.id, self.starting_step = run_id, starting_step
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.broken = False

    def log(self, metrics: dict[str, float], step: int) -> None:
        if self.broken:
            raise wandb.Error("the service is gone")
        self.rows.append((step, metrics))

    def finish(self, exit_code: int) -> None:
        self.log({"exit": exit_code}, step=-1)


def monitor_with(
    monkeypatch: pytest.MonkeyPatch,
    run_dir: Path,
    run: FakeRun | Exception,
    resume_id: str | None,
    must_start: bool = False,
) -> tuple[WandbMonitor, dict[str, Any]]:
    """An online monitor whose wandb.init gives `run` (or raises it), and the arguments init got."""
    arguments: dict[str, Any] = {}

    def init(**given: Any) -> FakeRun:
        arguments.update(given)
        if isinstance(run, Exception):
            raise run
        return run

    monkeypatch.setattr(wandb, "init", init)
    config = WandbConfig(mode="online")
    return WandbMonitor(
        config, run_dir=run_dir, run_config={}, resume_id=resume_id, last_step=9, must_start=must_start
    ), arguments


def test_online_the_server_says_which_step_is_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun("old", starting_step=6)
    monitor, arguments = monitor_with(monkeypatch, tmp_path, run, "old")
    assert (arguments["id"], arguments["resume"], arguments["mode"]) == ("old", "must", "online")
    for step in (4, 5, 6, 7):
        monitor.log(step, {"a": 1.0})
    monitor.close(exit_code=3)
    assert run.rows == [(6, {"a": 1.0}), (7, {"a": 1.0}), (-1, {"exit": 3})]


def test_a_new_online_run_is_not_asked_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, arguments = monitor_with(monkeypatch, tmp_path, FakeRun("new", starting_step=0), None)
    assert (arguments["id"], arguments["resume"]) == (None, None)
    assert monitor.id == "new"


def test_wandb_that_cannot_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The id of the resumed run stays known: the next checkpoint must not lose it."""
    monitor, _ = monitor_with(monkeypatch, tmp_path, wandb.errors.CommError("no network"), "old")
    monitor.log(1, {"a": 1.0})
    monitor.close(exit_code=0)
    assert monitor.id == "old"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [
        "wandb cannot start, the run goes on without it: no network"
        " (an offline part must be sent by `wandb sync` before it goes on online)"
    ]


@pytest.mark.parametrize("failure", [wandb.errors.CommError("no network\ndetails"), None])
def test_a_new_run_does_not_start_without_the_wandb_it_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    disabled = FakeRun("none", starting_step=0)
    disabled.disabled = True
    with pytest.raises(ConfigError) as error:
        monitor_with(monkeypatch, tmp_path, failure or disabled, None, must_start=True)
    reason = "no network" if failure else "there is no login; log in by `wandb login`, or set WANDB_API_KEY"
    (fault,) = error.value.faults
    assert fault.key == "monitors.wandb.mode"
    assert fault.message.startswith(f'wandb cannot start: {reason}; mode = "offline" needs no server')


def test_wandb_that_fails_later_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = FakeRun("new", starting_step=0)
    monitor, _ = monitor_with(monkeypatch, tmp_path, run, None)
    monitor.log(1, {"a": 1.0})
    run.broken = True
    for step in (2, 3):
        monitor.log(step, {"a": 1.0})
    monitor.close(exit_code=0)
    assert run.rows == [(1, {"a": 1.0})]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["wandb failed, the run goes on without it: the service is gone"]
    assert monitor.id == "new"


@pytest.mark.parametrize(
    ("value", "clean"),
    [
        ({"api_key": "x", "hf_token": "x", "password": "x"}, {"api_key": "***", "hf_token": "***", "password": "***"}),
        ({"tokenizer": {"name": "x"}, "micro_batch_tokens": 4}, {"tokenizer": {"name": "x"}, "micro_batch_tokens": 4}),
        ({"pad_token": "<pad>", "eos_token_id": 0}, {"pad_token": "<pad>", "eos_token_id": 0}),
        ({"paths": ["https://me:pw@host/data", "a/b"]}, {"paths": ["https://***@host/data", "a/b"]}),
        ("export HF_TOKEN='a b' LR=3 WANDB_API_KEY=xyz; run", "export HF_TOKEN=*** LR=3 WANDB_API_KEY=***; run"),
    ],
)
def test_secrets_are_starred(value: Any, clean: Any) -> None:
    assert without_secrets(value) == clean
