"""How a worker leaves word of its failure."""

import errno
import io
import json
import logging
from contextlib import suppress
from pathlib import Path

import pytest

from trainer.errors import PeerError, RunError
from trainer.logs import RankLog, _FileHandler
from trainer.worker import _record, _reserve


def log_to(stream: io.StringIO, console: io.StringIO | None = None) -> RankLog:
    return RankLog(path=Path("rank_0.log"), rank=0, stream=stream, console=console or io.StringIO())


@pytest.fixture(autouse=True)
def keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logging is shut down at the end of a worker, not of these tests."""
    monkeypatch.setattr("logging.shutdown", lambda: None)


def test_a_failure_is_written_for_the_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream, path = io.StringIO(), tmp_path / "rank_0.error.json"
    _record(RunError("no luck"), log_to(stream), path)
    report = json.loads(path.read_text())
    assert (report["kind"], report["message"]) == ("run", "no luck")
    assert stream.getvalue() == report["text"]
    assert capsys.readouterr().err == ""


def test_a_failure_that_cannot_be_written_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    console, path = io.StringIO(), tmp_path / "missing" / "rank_3.error.json"
    _record(RunError("no space left on device"), log_to(io.StringIO(), console), path)
    assert console.getvalue() == "rank 3: no space left on device\n"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "run", "[Errno 28] No space left on device: 'a/b'"),
        (OSError(errno.EIO, "Input/output error", "a/b"), "crash", None),
        (PeerError("another rank ended"), "peer", "another rank ended"),
        (ValueError("boom"), "crash", None),
    ],
)
def test_kinds_of_failures(tmp_path: Path, error: Exception, kind: str, message: str | None) -> None:
    """Field case R67: a full disk is no bug, whatever code runs into it."""
    path = tmp_path / "rank_0.error.json"
    _record(error, log_to(io.StringIO()), path)
    report = json.loads(path.read_text())
    assert (report["kind"], report.get("message")) == (kind, message)


def test_a_log_that_takes_no_more_is_said_once_and_nothing_else_happens() -> None:
    """Field case R67: lines of a rank are lost, training is not."""
    console = io.StringIO()
    with Path("/dev/full").open("w", buffering=1) as full:
        handler = _FileHandler(RankLog(path=Path("rank_1.log"), rank=1, stream=full, console=console))
        for number in range(3):
            handler.handle(logging.makeLogRecord({"msg": f"line {number}"}))
        with suppress(OSError):
            full.close()
    assert console.getvalue() == "rank 1: rank_1.log cannot be written, lines are lost: No space left on device\n"


def test_a_report_fits_where_room_was_reserved_for_it(tmp_path: Path) -> None:
    """Field case R67: a disk that is full by then still takes it, since its blocks are there."""
    path = tmp_path / "rank_0.error.json"
    _reserve(path)
    size = (tmp_path / "rank_0.error.new").stat().st_size
    stream = io.StringIO()
    _record(ValueError("x" * 10 * size + "the end"), log_to(stream), path)
    assert path.stat().st_size == size
    report = json.loads(path.read_text())
    assert report["kind"] == "crash" and report["text"].endswith("the end\n") and len(report["text"]) > size / 8
    assert len(stream.getvalue()) > 10 * size
