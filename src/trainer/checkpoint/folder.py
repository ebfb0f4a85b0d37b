"""The folder of a run's checkpoints: what is whole, what is left over from a killed run, what may go.

checkpoints/
  step_200/            whole, or damaged later; never half-written
    __0_0.distcp       tensors, one file per rank
    .metadata          where each tensor lies
    state.json         everything else, and size and checksum of every file
  .step_300.tmp/       being written
  .step_200.old/       being replaced by a new step_200, put back if that does not happen
  .step_100.gone/      being removed
"""

import logging
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from trainer.checkpoint.manifest import STEP_NAME, FileRecord, read_checkpoint, write_manifest
from trainer.checkpoint.safe_reader import DamagedError
from trainer.files import hide, rename_over, sync

FOLDER_NAME = "checkpoints"

_LEFTOVER_NAME = re.compile(r"\.step_\d+\.(tmp|old|gone)")

logger = logging.getLogger(__name__)


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies once it is whole."""
    return folder / f"step_{step}"


def list_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in `folder`, ascending by number; damaged ones included, half-written ones not."""
    if not folder.is_dir():
        return []
    matches = (STEP_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def find_checkpoint(
    run_dir: Path, step: int | None, say: Callable[[str], None], *, at_most: int | None = None, repair: bool = True
) -> Path:
    """The checkpoint to resume from. The content of its tensors is not checked: see `wrong_content`.

    Args:
        run_dir: the run that wrote it.
        step: its step; None: the newest whole one.
        say: told about each damaged one that is passed over.
        at_most: look at no later steps. A run that goes back needs this: what lies ahead of it in the folder is of an
            earlier attempt.
        repair: put a checkpoint back that a killed run left half-way through its replacement. Not for readers of a run
            that may be alive: its writer would stumble.

    Raises:
        ConfigError: there is none, or the one asked for is missing or damaged.
    """
    folder = run_dir / FOLDER_NAME
    if repair:
        _put_back_replaced(folder)
    steps = _steps_up_to(folder, at_most)
    if not steps:
        bound = "" if at_most is None else f" up to step {at_most}"
        raise ConfigError.one("resume", f"there is no checkpoint{bound} in {folder}")
    if step is not None:
        return _find_step(folder, step, steps)
    found = _newest_whole(folder, steps, say)
    if found is None:
        raise ConfigError.one("resume", f"every checkpoint in {folder} is damaged: {_name(steps)}")
    return found


def find_newest(
    run_dir: Path, say: Callable[[str], None], *, at_most: int | None = None, repair: bool = True
) -> Path | None:
    """As `find_checkpoint` without a step, and None where there is none that is whole."""
    folder = run_dir / FOLDER_NAME
    if repair:
        _put_back_replaced(folder)
    return _newest_whole(folder, _steps_up_to(folder, at_most), say)


def _steps_up_to(folder: Path, at_most: int | None) -> list[int]:
    return [found for found in list_steps(folder) if at_most is None or found <= at_most]


def _newest_whole(folder: Path, steps: list[int], say: Callable[[str], None]) -> Path | None:
    for candidate in reversed(steps):
        path = step_path(folder, candidate)
        reason = damage(path)
        if reason is None:
            return path
        say(f"checkpoint {path} is damaged and passed over: {reason}")
    return None


def _find_step(folder: Path, step: int, steps: list[int]) -> Path:
    path = step_path(folder, step)
    if step not in steps:
        raise ConfigError.one("resume.step", f"there is no step_{step} in {folder}; there are {_name(steps)}")
    reason = damage(path)
    if reason is not None:
        whole = [other for other in steps if damage(step_path(folder, other)) is None]
        raise ConfigError.one("resume.step", f"{path} is damaged: {reason}; whole are {_name(whole)}")
    return path


def _name(steps: list[int], most: int = 20) -> str:
    names = [f"step_{step}" for step in steps[-most:]]
    return ", ".join((["..."] if len(steps) > most else []) + names) or "none"


def damage(path: Path) -> str | None:
    """Why the checkpoint at `path` cannot be loaded, or None when it is whole."""
    try:
        read_checkpoint(path)
    except DamagedError as error:
        return str(error)
    return None


def prepare(folder: Path) -> None:
    """Make `folder`, and clear what a killed run left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    _put_back_replaced(folder)
    for path in list(folder.iterdir()):
        if _LEFTOVER_NAME.fullmatch(path.name):
            shutil.rmtree(path)


def _put_back_replaced(folder: Path) -> None:
    """Undo a `commit` that was killed between its two renames."""
    for replaced in list(folder.glob(".step_*.old")):
        final = folder / replaced.stem[1:]
        if not final.exists():
            with suppress(OSError):  # another rank was faster, or the folder is not ours to write
                replaced.rename(final)


def commit(temporary: Path, final: Path, *, step: int, state: dict[str, Any], files: Mapping[str, FileRecord]) -> None:
    """Complete the written folder and give it its name. Killed at any moment, no folder of that name is half-written.

    Args:
        temporary: holds the tensors, already on disk.
        final: the name that says that the checkpoint is whole.
        state: everything that is no tensor, JSON-able.
        files: every file of tensors.
    """
    write_manifest(temporary, step=step, state=state, files=files)
    sync(temporary)
    # Killed half-way, what was there is put back by `_put_back_replaced`.
    rename_over(temporary, final)


def prune(
    folder: Path,
    step: int,
    *,
    keep_last: int | None,
    keep_interval: int | None,
    on_removal: Callable[[int], None] = lambda step: None,
) -> None:
    """Remove old checkpoints after that of `step` was committed.

    Kept are the newest `keep_last` whole ones up to `step`, multiples of `keep_interval`, and all later ones (of a
    run that was resumed from further back: they are not this run's to judge). A damaged one does not count, so that
    `keep_last` can be relied on, and goes only once it is older than all that do.

    `on_removal` is told the step of each one that goes, before it does, and removes what belongs to it.

    A checkpoint that cannot be removed is no reason to end a training: that is logged, and tried again next time.
    """
    try:
        if keep_last is not None:
            for old in _superseded([other for other in list_steps(folder) if other <= step], folder, keep_last):
                if keep_interval is None or old % keep_interval:
                    on_removal(old)
                    # Renamed first: killed in the removal, nothing is left that looks like a damaged checkpoint.
                    hide(step_path(folder, old), "gone")
        for path in list(folder.glob(".step_*.gone")):
            shutil.rmtree(path)
    except OSError as error:
        logger.warning("an old checkpoint in %s cannot be removed: %s", folder, error)


def _superseded(steps: list[int], folder: Path, keep_last: int) -> list[int]:
    """Those of `steps` (ascending) that are older than the newest `keep_last` whole ones."""
    kept = 0
    for position in reversed(range(len(steps))):
        kept += damage(step_path(folder, steps[position])) is None
        if kept == keep_last:
            return steps[:position]
    return []
