"""The folder between a training run and its eval-worker: who may take what, and what is left after a kill."""

from pathlib import Path

from trainer.snapshots import queue


def put(run_dir: Path, *steps: int, text: str = "weights") -> None:
    for step in steps:
        path = queue.snapshot_path(run_dir, step)
        path.mkdir(parents=True)
        (path / "weights").write_text(text)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "eval_snapshots").iterdir())


def test_a_run_without_snapshots(tmp_path: Path) -> None:
    assert (queue.waiting(tmp_path), queue.claimed(tmp_path), queue.is_over(tmp_path)) == ([], [], False)
    assert queue.cut_back(tmp_path, 0) == queue.discard_oldest(tmp_path, 1) == queue.put_back(tmp_path) == []
    queue.clear_leftovers(tmp_path)
    queue.unmark_final(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_steps_are_ordered_as_numbers_and_nothing_else_is_one(tmp_path: Path) -> None:
    put(tmp_path, 1000, 200, 30)
    for other in (".step_4.tmp", "step_05", "step_6.old", "notes", ".step_7.gone"):
        (tmp_path / "eval_snapshots" / other).mkdir()
    assert queue.waiting(tmp_path) == [30, 200, 1000]
    assert queue.claimed(tmp_path) == []


def test_a_claimed_one_waits_no_more(tmp_path: Path) -> None:
    put(tmp_path, 1, 2)
    path = queue.claim(tmp_path, 2)
    assert path is not None and path == queue.claimed_path(tmp_path, 2)
    assert (path / "weights").read_text() == "weights"
    assert (queue.waiting(tmp_path), queue.claimed(tmp_path)) == ([1], [2])
    assert queue.claim(tmp_path, 3) is None
    assert [step for step in range(4) if queue.was_written(tmp_path, step)] == [1, 2]
    assert queue.discard(path)
    assert not queue.discard(path)
    assert names(tmp_path) == ["step_1"]


def test_the_trainer_deletes_the_oldest_that_nobody_claimed(tmp_path: Path) -> None:
    put(tmp_path, 1, 2, 3, 4)
    queue.claim(tmp_path, 1)
    assert queue.discard_oldest(tmp_path, 1) == [2, 3]
    assert names(tmp_path) == ["step_1.scoring", "step_4"]
    assert queue.discard_oldest(tmp_path, 0) == [4]
    assert queue.discard_oldest(tmp_path, 0) == []


def test_what_lies_ahead_of_a_run_that_goes_back_is_deleted(tmp_path: Path) -> None:
    put(tmp_path, 2, 4, 6, 8)
    queue.claim(tmp_path, 6)
    queue.mark_final(tmp_path, 8)
    assert queue.cut_back(tmp_path, 8) == []
    assert queue.is_over(tmp_path)
    assert queue.cut_back(tmp_path, 4) == [6, 8]
    assert names(tmp_path) == ["step_2", "step_4"]
    assert not queue.is_over(tmp_path)


def test_a_killed_workers_claim_waits_again(tmp_path: Path) -> None:
    put(tmp_path, 2, 4)
    queue.claim(tmp_path, 4)
    assert queue.put_back(tmp_path) == [4]
    assert queue.waiting(tmp_path) == [2, 4]
    assert queue.put_back(tmp_path) == []


def test_of_two_snapshots_of_a_step_the_newer_one_counts(tmp_path: Path) -> None:
    for take in (queue.put_back, lambda run_dir: queue.claim(run_dir, 4)):
        put(tmp_path, 4, text="old")
        queue.claim(tmp_path, 4)
        put(tmp_path, 4, text="new")
        take(tmp_path)
        (found,) = (tmp_path / "eval_snapshots").iterdir()
        assert (found / "weights").read_text() == "new"
        queue.discard(found)


def test_the_last_one(tmp_path: Path) -> None:
    queue.mark_final(tmp_path, 12)
    assert (queue.is_over(tmp_path), queue.final_step(tmp_path)) == (True, 12)
    assert queue.was_written(tmp_path, 12)
    queue.unmark_final(tmp_path)
    assert (queue.is_over(tmp_path), queue.final_step(tmp_path)) == (False, None)


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, 1, 2)
    queue.claim(tmp_path, 2)
    queue.mark_final(tmp_path, 2)
    for name in (".step_3.tmp", ".step_4.old", ".step_5.gone", ".step_6.scoring.gone"):
        (tmp_path / "eval_snapshots" / name).mkdir()
    queue.clear_leftovers(tmp_path)
    assert names(tmp_path) == ["final.json", "step_1", "step_2.scoring"]
