"""The folder through which a training run hands weights to its `eval-worker`. Both may be alive, or neither.

eval_snapshots/
  step_200/             waits to be scored
  step_150.scoring/     claimed by the worker
  final.json            the step of the run's last snapshot: no later one will come
  .step_250.tmp/        being written
  .step_100.gone/       being removed

Every change is one rename. The training run writes step_N and final.json, in this order, and deletes what nobody
claimed when too many wait. The worker claims, scores and deletes. A run that goes back to an earlier step deletes what
lies ahead, claimed or not: those are weights it no longer has. It does so before it cuts metrics.jsonl back, so a
worker that sees its claimed folder under the lock of that file may write its results there.

A worker ends when the run is over and nothing waits, asked in this order: `is_over` first, then `waiting`.
"""

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path

from trainer.files import hide, write_whole

FOLDER_NAME = "eval_snapshots"

_NAME = re.compile(r"step_(0|[1-9][0-9]*)(\.scoring)?")
_LEFTOVER_NAME = re.compile(r"\.step_[0-9]+(\.scoring)?\.(tmp|old|gone)")
_MARK_NAME = "final.json"


def snapshot_path(run_dir: Path, step: int) -> Path:
    """Where the snapshot of `step` waits."""
    return run_dir / FOLDER_NAME / f"step_{step}"


def claimed_path(run_dir: Path, step: int) -> Path:
    """Where the snapshot of `step` lies while it is scored."""
    return run_dir / FOLDER_NAME / f"step_{step}.scoring"


def waiting(run_dir: Path) -> list[int]:
    """Steps whose snapshots nobody has claimed, ascending."""
    return _steps(run_dir, claimed=False)


def claimed(run_dir: Path) -> list[int]:
    """Steps whose snapshots a worker has claimed, ascending; the worker may be dead."""
    return _steps(run_dir, claimed=True)


def was_written(run_dir: Path, step: int) -> bool:
    """The snapshot of `step` waits or is being scored, or was the last; of others that were scored nothing is left."""
    return step in (*waiting(run_dir), *claimed(run_dir), final_step(run_dir))


def claim(run_dir: Path, step: int) -> Path | None:
    """Take the waiting snapshot of `step`. Only the holder of the worker's lock may call this.

    Returns:
        its folder from now on; None when the training run has deleted it meanwhile.
    """
    target = claimed_path(run_dir, step)
    discard(target)  # of the weights that the run had at this step before it went back
    try:
        return snapshot_path(run_dir, step).rename(target)
    except FileNotFoundError:
        return None


def put_back(run_dir: Path) -> list[int]:
    """Have the snapshots wait again that a worker claimed and was killed over. Only the holder of the worker's lock may
    call this.

    Returns:
        their steps.
    """
    steps = []
    for step in claimed(run_dir):
        target = snapshot_path(run_dir, step)
        if target.exists():  # written anew meanwhile
            discard(claimed_path(run_dir, step))
            continue
        with suppress(FileNotFoundError):  # the run went back just now
            claimed_path(run_dir, step).rename(target)
            steps.append(step)
    return steps


def discard(path: Path) -> bool:
    """Delete a snapshot. Killed at any moment, none that looks whole is left damaged.

    Returns:
        whether it was there: the other side may have been faster.
    """
    try:
        gone = hide(path, "gone")
    except FileNotFoundError:
        return False
    shutil.rmtree(gone, ignore_errors=True)  # what is left goes when the next training run starts
    return True


def discard_oldest(run_dir: Path, most: int) -> list[int]:
    """Delete the oldest waiting snapshots until at most `most` wait. Gives their steps."""
    steps = waiting(run_dir)
    return [step for step in steps[: max(0, len(steps) - most)] if discard(snapshot_path(run_dir, step))]


def cut_back(run_dir: Path, step: int) -> list[int]:
    """The run goes on from `step`: delete the snapshots of later steps, claimed or not. Gives their steps."""
    final = final_step(run_dir)
    if final is not None and final > step:
        unmark_final(run_dir)
    found = {snapshot_path(run_dir, later): later for later in waiting(run_dir)}
    found |= {claimed_path(run_dir, later): later for later in claimed(run_dir)}
    return sorted(later for path, later in found.items() if later > step and discard(path))


def final_step(run_dir: Path) -> int | None:
    """Step of the run's last snapshot; None while more are to come."""
    try:
        return json.loads((run_dir / FOLDER_NAME / _MARK_NAME).read_text(encoding="utf-8"))["step"]
    except FileNotFoundError:
        return None


def is_over(run_dir: Path) -> bool:
    """No snapshot will come that is not there by now."""
    return final_step(run_dir) is not None


def mark_final(run_dir: Path, step: int) -> None:
    """The snapshot of `step` is written, and is the last."""
    write_whole(run_dir / FOLDER_NAME / _MARK_NAME, (json.dumps({"step": step}) + "\n").encode())


def unmark_final(run_dir: Path) -> None:
    """More snapshots are to come."""
    (run_dir / FOLDER_NAME / _MARK_NAME).unlink(missing_ok=True)


def clear_leftovers(run_dir: Path) -> None:
    """Delete what a killed run or worker left half-written or half-deleted. Only the training run may call this."""
    folder = run_dir / FOLDER_NAME
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if _LEFTOVER_NAME.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)  # a live worker may be deleting it too


def _steps(run_dir: Path, *, claimed: bool) -> list[int]:
    folder = run_dir / FOLDER_NAME
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in matches if match and bool(match[2]) == claimed)
