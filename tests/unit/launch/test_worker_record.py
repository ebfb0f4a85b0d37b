"""How a worker leaves word of its failure."""

import io
import json
from pathlib import Path

import pytest

from trainer.errors import RunError
from trainer.worker import _record


@pytest.fixture(autouse=True)
def keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logging is shut down at the end of a worker, not of these tests."""
    monkeypatch.setattr("logging.shutdown", lambda: None)


def test_a_failure_is_written_for_the_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream, path = io.StringIO(), tmp_path / "rank_0.error.json"
    _record(RunError("no luck"), stream, path)
    report = json.loads(path.read_text())
    assert (report["kind"], report["message"]) == ("run", "no luck")
    assert stream.getvalue() == report["text"]
    assert capsys.readouterr().err == ""


def test_a_failure_that_cannot_be_written_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _record(RunError("no space left on device"), io.StringIO(), tmp_path / "missing" / "rank_0.error.json")
    assert capsys.readouterr().err == "no space left on device\n"
