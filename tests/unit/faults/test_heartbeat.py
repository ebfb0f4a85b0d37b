"""What a rank says of itself, and what the launcher reads."""

import errno
import json
import os
from pathlib import Path

import pytest

from trainer.heartbeat import Heartbeat, Phase, read_beat


def test_the_last_sign_is_read_and_counts_on(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.heartbeat"
    heartbeat = Heartbeat(path)
    first = read_beat(path)
    assert first is not None and (first.number, first.step, str(first)) == (1, 0, "starting")
    heartbeat.beat(Phase.VALIDATION, 100_000)
    heartbeat.beat(Phase.DATA)  # shorter, so nothing of the line before may be left
    last = read_beat(path)
    assert last is not None and (last.number, str(last)) == (3, "step 100000, waiting for data")
    assert path.stat().st_size == 160
    assert json.loads(path.read_text())["phase"] == "waiting for data"


def test_every_phase_fits_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.heartbeat"
    heartbeat = Heartbeat(path)
    for phase in Phase:
        heartbeat.beat(phase, 10**9)
        beat = read_beat(path)
        assert beat is not None and beat.phase is phase


def test_a_file_that_is_torn_or_absent_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.heartbeat"
    assert read_beat(path) is None
    for torn in ('{"number": 3, "ste', "[]", '{"number": 3, "step": 1, "phase": "asleep", "time": 1}'):
        path.write_text(torn)
        assert read_beat(path) is None


def test_trouble_with_the_file_is_not_the_runs(tmp_path: Path) -> None:
    lost = Heartbeat(tmp_path / "absent" / "rank_0.heartbeat")
    lost.beat(Phase.OPTIMIZER, 3)
    assert lost.last is not None and str(lost.last) == "step 3, optimizer"
    heartbeat = Heartbeat(tmp_path / "rank_0.heartbeat")
    os.close(heartbeat._file or -1)
    heartbeat.beat(Phase.OPTIMIZER, 3)


def test_units_of_long_work_sign(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.heartbeat"
    leave = Heartbeat(path).before(lambda: True, Phase.VALIDATION)
    assert [leave(), leave()] == [True, True]
    beat = read_beat(path)
    assert beat is not None and (beat.number, beat.phase) == (3, Phase.VALIDATION)


def test_a_sign_that_cannot_be_written_leaves_no_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank_0.heartbeat"
    heartbeat = Heartbeat(path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        heartbeat.beat(Phase.DATA, 3)
    assert read_beat(path) is None
    heartbeat.beat(Phase.OPTIMIZER)
    beat = read_beat(path)
    assert beat is not None and (beat.number, str(beat)) == (3, "step 3, optimizer")
