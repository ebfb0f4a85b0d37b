"""Where `[resume]` looks for the checkpoint that a run goes on from, and what it takes of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from configs.checkpoint import CheckpointConfig, ResumeConfig


@dataclass(frozen=True, kw_only=True)
class Place:
    """A run whose checkpoints may be gone on from."""

    run_dir: Path
    step: int | None
    """None: the newest whole one."""

    required: bool
    """That there is one."""

    is_own: bool
    """It is the run itself that goes on; else it forks from another one, which may be alive."""


def find_first(
    resume: ResumeConfig | None, run_dir: Path, look: Callable[[Place], Path | None]
) -> tuple[Place, Path] | None:
    """The checkpoint to go on from, and where it was found; None for a fresh start.

    Args:
        run_dir: of the run that is to go on.
        look: gives the checkpoint of a place; raises where a required one is missing.
    """
    for place in [] if resume is None else _places(resume, run_dir):
        found = look(place)
        if found is not None:
            return place, found
    return None


def _places(resume: ResumeConfig, run_dir: Path) -> list[Place]:
    own = Place(run_dir=run_dir, step=None if resume.auto else resume.step, required=not resume.auto, is_own=True)
    if resume.dir is None:
        return [own]
    other = Place(run_dir=resume.dir, step=resume.step, required=True, is_own=False)
    return [own, other] if resume.auto else [other]


def skips_of(resume: ResumeConfig | None, ckpt: CheckpointConfig | None, *, is_own: bool) -> CheckpointConfig:
    """What `ckpt.skip_*` says about a checkpoint.

    With `resume.auto` they are about the other run's: the own ones come from runs that have skipped it already, and a
    job that is queued again would lose its moments, say, every time.

    Args:
        is_own: it was found in the run that goes on.
    """
    if ckpt is None or (is_own and resume is not None and resume.auto):
        return CheckpointConfig()
    return ckpt
