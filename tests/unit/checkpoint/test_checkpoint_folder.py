"""Which checkpoint a run resumes from, and which are kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from trainer.checkpoint import find_checkpoint
from trainer.checkpoint.folder import list_steps, prune


@pytest.fixture
def run_with(make_checkpointer: Any, tensors_of: Any, tmp_path: Path) -> Any:
    """`run_with(1, 2, 10)`: the folder of whole checkpoints of these steps."""

    def make(*steps: int) -> Path:
        saver = make_checkpointer()
        for step in steps:
            saver.save(step, tensors_of(step), {})
        saver.wait()
        return tmp_path / "checkpoints"

    return make


def _rewrite_state(path: Path, **changes: Any) -> None:
    """Without a new checksum."""
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | changes))


def _cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


DAMAGES = {
    "no metadata": (lambda path, forge: (path / ".metadata").unlink(), ".metadata is missing"),
    "no state": (lambda path, forge: (path / "state.json").unlink(), "state.json is missing"),
    "empty state": (lambda path, forge: _cut(path / "state.json", 0), "state.json cannot be read (Expecting value"),
    "other json": (
        lambda path, forge: (path / "state.json").write_text("[1]"),
        "state.json is not of the known format",
    ),
    "another step": (lambda path, forge: forge(path, step=7), "state.json is of step 7"),
    "changed state": (lambda path, forge: _rewrite_state(path, step=7), "state.json was changed since it was written"),
    "older format": (
        lambda path, forge: _rewrite_state(path, format=1),
        "state.json has format 1; this version reads 2",
    ),
    "no files": (lambda path, forge: forge(path, records={}), "state.json does not list"),
    "no shard": (lambda path, forge: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "cut shard": (lambda path, forge: _cut(path / "__0_0.distcp", 100), "__0_0.distcp has 100 bytes instead of "),
    "empty metadata": (lambda path, forge: _cut(path / ".metadata", 0), ".metadata has 0 bytes instead of "),
    "other metadata": (
        lambda path, forge: (path / ".metadata").write_bytes(b"x" * (path / ".metadata").stat().st_size),
        ".metadata holds other bytes than were written (checksum ",
    ),
    "forged metadata": (
        lambda path, forge: forge(path, files={".metadata": b"x"}),
        ".metadata cannot be read (UnpicklingError",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_newest_is_passed_over(run_with: Any, forge: Any, tmp_path: Path, kind: str) -> None:
    """Field case R66: a truncated shard or missing metadata in the newest: the one before it is taken, and said."""
    folder = run_with(9, 10)
    damage, reason = DAMAGES[kind]
    damage(folder / "step_10", forge)
    said: list[str] = []
    assert find_checkpoint(tmp_path, None, said.append) == folder / "step_9"
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint {folder / 'step_10'} is damaged and passed over: {reason}")


def test_newest_is_by_number_and_half_written_ones_do_not_count(run_with: Any, tmp_path: Path) -> None:
    """Field case R66: numeric order; `.tmp` folders and foreign names are not checkpoints."""
    folder = run_with(2, 9, 10)
    (folder / "step_10").rename(folder / ".step_11.tmp")
    for name in ("step_012", "step_13.tmp", "step_", "other"):
        (folder / name).mkdir()
    assert list_steps(folder) == [2, 9]
    assert find_checkpoint(tmp_path, None, print) == folder / "step_9"


def test_going_back_never_goes_forward(run_with: Any, tmp_path: Path) -> None:
    """Resumed from step 2, with steps 9 and 10 of the earlier attempt still there."""
    folder = run_with(2, 9, 10)
    assert find_checkpoint(tmp_path, None, print, at_most=9) == folder / "step_9"
    assert find_checkpoint(tmp_path, None, print, at_most=8) == folder / "step_2"
    with pytest.raises(ConfigError, match=r"resume: there is no checkpoint up to step 1 in "):
        find_checkpoint(tmp_path, None, print, at_most=1)


def test_step_that_does_not_exist(run_with: Any, tmp_path: Path) -> None:
    """Field case R72: a missing step is an error that lists what is there."""
    folder = run_with(2, 10)
    assert find_checkpoint(tmp_path, 2, print) == folder / "step_2"
    with pytest.raises(ConfigError) as raised:
        find_checkpoint(tmp_path, 999, print)
    assert raised.value.faults[0].key == "resume.step"
    assert raised.value.faults[0].message == f"there is no step_999 in {folder}; there are step_2, step_10"


def test_step_asked_for_is_damaged(run_with: Any, tmp_path: Path) -> None:
    """Field case R72: another checkpoint is never taken in place of the one asked for."""
    folder = run_with(2, 10)
    (folder / "step_10" / ".metadata").unlink()
    with pytest.raises(ConfigError) as raised:
        find_checkpoint(tmp_path, 10, print)
    assert raised.value.faults[0].key == "resume.step"
    assert raised.value.faults[0].message == f"{folder / 'step_10'} is damaged: .metadata is missing; whole are step_2"


def test_no_checkpoint(run_with: Any, tmp_path: Path) -> None:
    """Field case R72: nothing to resume from is an error, for a run without the folder too."""
    for run_dir, make in ((tmp_path / "nowhere", lambda: None), (tmp_path, run_with)):
        make()
        with pytest.raises(ConfigError) as raised:
            find_checkpoint(run_dir, None, print)
        assert raised.value.faults[0].key == "resume"
        assert raised.value.faults[0].message == f"there is no checkpoint in {run_dir / 'checkpoints'}"


def test_all_damaged(run_with: Any, tmp_path: Path) -> None:
    folder = run_with(1, 2)
    for step in (1, 2):
        (folder / f"step_{step}" / "state.json").unlink()
    said: list[str] = []
    with pytest.raises(ConfigError) as raised:
        find_checkpoint(tmp_path, None, said.append)
    assert raised.value.faults[0].message == f"every checkpoint in {folder} is damaged: step_1, step_2"
    assert len(said) == 2


@pytest.mark.parametrize(
    ("keep_last", "keep_interval", "kept"),
    [
        (None, None, [2, 4, 6, 8, 10]),
        (None, 4, [2, 4, 6, 8, 10]),
        (1, None, [8, 10]),
        (2, None, [6, 8, 10]),
        (9, None, [2, 4, 6, 8, 10]),
        (1, 4, [4, 8, 10]),
        (2, 3, [6, 8, 10]),
        (1, 2, [2, 4, 6, 8, 10]),
    ],
)
def test_keep_rules(run_with: Any, keep_last: int | None, keep_interval: int | None, kept: list[int]) -> None:
    """After step 8 was saved; step 10 is of a run that was resumed from further back, and stays."""
    folder = run_with(2, 4, 6, 8, 10)
    prune(folder, 8, keep_last=keep_last, keep_interval=keep_interval)
    assert list_steps(folder) == kept
    assert len(list(folder.iterdir())) == len(kept)


def test_damaged_ones_do_not_count_as_kept(run_with: Any) -> None:
    folder = run_with(2, 4, 6, 8)
    (folder / "step_6" / ".metadata").unlink()
    (folder / "step_2" / ".metadata").unlink()
    prune(folder, 8, keep_last=2, keep_interval=None)
    assert list_steps(folder) == [4, 6, 8]


def test_one_that_cannot_be_removed_is_tried_again(
    run_with: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run_with(1, 2)

    def busy(path: Path) -> None:
        raise OSError(f"{path.name} is busy")

    with monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoint.folder.shutil.rmtree", busy)
        prune(folder, 2, keep_last=1, keep_interval=None)
    messages = [record.getMessage() for record in caplog.records if record.name == "trainer.checkpoint.folder"]
    assert messages == [f"an old checkpoint in {folder} cannot be removed: .step_1.gone is busy"]
    assert list_steps(folder) == [2]
    prune(folder, 2, keep_last=1, keep_interval=None)
    assert [path.name for path in folder.iterdir()] == ["step_2"]
