"""`[ckpt]`, `[resume]` and `[nan_guard]`."""

from pathlib import Path

from pydantic import Field

from configs.base import BaseConfig
from configs.errors import Fault


class CheckpointConfig(BaseConfig):
    """`[ckpt]`: checkpoints in <run_dir>/checkpoints/step_N."""

    interval: int | None = Field(default=None, ge=1)
    """Save after every interval-th step; the last step is always saved."""

    keep_last: int | None = Field(default=None, ge=1)
    """Keep only the newest checkpoints."""

    keep_interval: int | None = Field(default=None, ge=1)
    """Keep every checkpoint whose step is a multiple of this, whatever keep_last says."""

    async_save: bool = True
    """Write in the background while training goes on."""

    weights: bool = False
    """Also write the weights of every checkpoint to <run_dir>/weights/step_N, as a Hugging Face folder in the dtype of
    the forward pass. They go when their checkpoint goes."""

    skip_optimizer: bool = False
    """On resume: start with empty optimizer moments."""

    skip_dataloader: bool = False
    """On resume: start at the data's first row."""

    skip_scheduler: bool = False
    """On resume: the learning-rate schedule starts anew at the resumed step."""

    skip_progress: bool = False
    """On resume: the step and token counters start at zero."""

    def table_faults(self) -> list[Fault]:
        if self.interval is None or self.keep_interval is None or self.keep_interval % self.interval == 0:
            return []
        message = f"{self.keep_interval} is not a multiple of interval = {self.interval}: most of these steps have none"
        return [Fault(key="keep_interval", message=message)]


class EvalSnapshotsConfig(BaseConfig):
    """`[eval_snapshots]`: weights for `eval-worker` to score, in <run_dir>/eval_snapshots/step_N."""

    interval: int = Field(ge=1)
    """Write one after every interval-th step; the last step's is always written."""

    max_waiting: int = Field(default=8, ge=1)
    """Where so many wait to be scored, the oldest is deleted before the next is written."""


class ResumeConfig(BaseConfig):
    """`[resume]`: go on from a checkpoint. Empty: the newest whole one of this run."""

    step: int | None = Field(default=None, ge=0)
    """Step of the checkpoint; with `auto`, of that in `dir`. Unset: the newest whole one."""

    dir: Path | None = None
    """Run directory to fork from. Unset: this run's own."""

    auto: bool = False
    """For jobs that are queued again: the newest whole checkpoint of this run; before there is one, that of `dir`, or
    without `dir` a fresh start. `ckpt.skip_*` are then about the checkpoint of `dir` only."""


class NanGuardConfig(BaseConfig):
    """`[nan_guard]`: what to do about steps whose loss or gradient is not finite (their update is always skipped)."""

    max_consecutive: int = Field(default=10, ge=1)
    """After this many such steps in a row the run goes back to its last checkpoint and passes over their rows."""

    max_rewinds: int = Field(default=1, ge=0)
    """How often it may go back before it stops with an error; 0 stops at once."""
