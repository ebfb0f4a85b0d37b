"""wandb online, against a server of the tests: what is there at the start, and what may go away later."""

import logging
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

wandb = pytest.importorskip("wandb", reason="wandb is not installed on the GPU machine")

import trainer.monitors.wandb as monitor_module  # noqa: E402
import trainer.monitors.wandb_run as run_module  # noqa: E402
from configs.errors import ConfigError  # noqa: E402
from configs.sft import SFTConfig  # noqa: E402
from trainer.monitors import build_monitors, check_monitors  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_login")

HINT = 'mode = "offline" needs no server'


def config_of(resume: dict[str, Any] | None = None, mode: str = "online") -> SFTConfig:
    values = {"data": {"type": "fake"}, "run": {"name": "one"}, "monitors": {"wandb": {"mode": mode}}}
    return SFTConfig.model_validate(values | {"resume": resume})


def fault_of(config: SFTConfig) -> tuple[str, str]:
    with pytest.raises(ConfigError) as error:
        check_monitors(config, print)
    (fault,) = error.value.faults
    return fault.key, fault.message


def test_a_login_that_works_is_no_fault(server: Any, capfd: pytest.CaptureFixture[str]) -> None:
    check_monitors(config_of(), print)
    assert capfd.readouterr().out == ""


def test_no_login_is_a_fault_before_the_start(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a resumed run; and nobody is asked for one, though there may be a terminal."""
    monkeypatch.delenv("WANDB_API_KEY")
    for config in (config_of(), config_of(resume={})):
        key, message = fault_of(config)
        assert key == "monitors.wandb.mode"
        assert message.startswith(
            "wandb cannot start: there is no login; log in by `wandb login`, or set WANDB_API_KEY"
        )
    check_monitors(config_of(mode="offline"), print)


@pytest.mark.parametrize("silent", [False, True])
def test_a_server_that_cannot_be_reached_is_a_fault_of_a_new_run_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], silent: bool
) -> None:
    """A port where nobody listens, and one where nobody answers; a restart of a run does not depend on wandb."""
    monkeypatch.setattr(monitor_module, "_LOGIN_SECONDS", 1)
    start = time.monotonic()
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        if silent:
            hole.listen()
        address = f"http://127.0.0.1:{hole.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", address)
        if not silent:
            check_monitors(config_of(resume={}), print)
            said = capsys.readouterr().out
            assert said.startswith("wandb cannot start for now, the run goes on without it") and said.count("\n") == 1
        key, message = fault_of(config_of())
    assert key == "monitors.wandb.mode"
    assert message.startswith(f"wandb cannot start: Failed to authenticate with {address}") and HINT in message
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_missing_package_is_a_fault_before_the_start(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    key, message = fault_of(config_of(resume={}, mode=mode))
    assert key == "monitors.wandb" and "install it, or give --no-monitors.wandb" in message


def test_a_server_that_goes_away_holds_up_nothing(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps are recorded as before, the end waits a bounded time, and one line says how to send the rest."""
    monkeypatch.setattr(run_module, "_FINISH_SECONDS", 1)
    monitors = build_monitors(config_of(), tmp_path, start_step=0, total_steps=600, wandb_id=None)
    assert monitors.wandb_id is not None
    monitors.log(1, {"loss/mean": 1.0})
    server.gone = True
    start = time.monotonic()
    for step in range(2, 601):
        monitors.log(step, {"loss/mean": 1.0})
    logged = time.monotonic()
    monitors.close()
    assert logged - start < 10 and time.monotonic() - logged < 10
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 600
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    (warning,) = warnings
    (folder,) = (tmp_path / "wandb").glob("run-*")
    assert warning == f"wandb did not get all of the run in 1 s; `wandb sync {folder}` sends it"


def test_a_failed_run_does_not_wait_for_wandb(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers wait in a collective until it has said that it failed."""
    monkeypatch.setattr(run_module, "_FINISH_SECONDS", 8)
    monkeypatch.setattr(run_module, "_FAILED_FINISH_SECONDS", 0.2)
    monitors = build_monitors(config_of(), tmp_path, start_step=0, total_steps=9, wandb_id=None)
    monitors.log(1, {"loss/mean": 1.0})
    server.gone = True
    start = time.monotonic()
    monitors.close(exit_code=1)
    assert time.monotonic() - start < 3


def test_a_whole_run_reaches_the_server(server: Any, tmp_path: Path) -> None:
    monitors = build_monitors(config_of(), tmp_path, start_step=0, total_steps=3, wandb_id=None)
    for step in (1, 2, 3):
        monitors.log(step, {"loss/mean": 1.0})
    monitors.close()
    assert server.rows == [1, 2, 3]
