"""Weights & Biases, online or offline. A run does not start without it when it was asked for; once started, trouble
with it never stops or holds up a run.

A resumed run goes on in the same wandb run. wandb takes steps in rising order only and silently drops the others, and
a run that resumes from an older checkpoint does some steps again: those are held back here, with a message, until the
run passes the last step that wandb has. metrics.jsonl has the repeated steps.
"""

import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import wandb

from configs.monitor import WandbConfig
from trainer.monitors.wandb_run import NO_LOGIN, SHARED, WandbRun, cannot_start, is_shared
from trainer.text import first_line

logger = logging.getLogger(__name__)

_LOGIN_SECONDS = 5
"""For one answer of the server, when the login is checked."""


class WandbMonitor:
    """The wandb run of a training."""

    def __init__(
        self,
        config: WandbConfig,
        *,
        run_dir: Path,
        run_config: dict[str, Any],
        resume_id: str | None,
        last_step: int | None,
        must_start: bool,
        shared: bool = False,
    ) -> None:
        """
        Args:
            config: `[monitors.wandb]`.
            run_dir, run_config, must_start: see WandbRun.
            resume_id: wandb run to go on with; None opens a new one.
            last_step: last step that the resumed run recorded before it ended; None if it recorded none.
            shared: a new run will get results from another process too. It can be so online only.

        Raises:
            ConfigError: wandb cannot start and must.
        """
        online = config.resolved_mode == "online"
        self._resume_id = resume_id
        shared = online and (shared if resume_id is None else is_shared(resume_id))
        self._sent: int | None = None
        """Last step that wandb has."""

        self._held_back = False
        self._next = 0
        """First step that wandb may get."""

        new_id = f"{secrets.token_hex(4)}{SHARED}" if shared else None
        self._run = run = WandbRun(
            config,
            run_dir=run_dir,
            run_config=run_config,
            run_id=new_id if resume_id is None else resume_id,
            # Offline there is nothing to look up: the same id makes `wandb sync` put both parts in one run.
            resume="must" if resume_id is not None and online else None,
            part="first" if shared else "only",
            any_order=shared,
            must_start=must_start,
        )
        if resume_id is not None and run.is_open:
            # The server knows what it got, of a shared run the number of rows only. There, and offline, the run's own
            # record is the best that is known.
            asked = online and not shared
            self._next = run.starting_step if asked else 0 if last_step is None else last_step + 1

    @property
    def id(self) -> str | None:
        """Id of the wandb run; the resumed one even while wandb fails, so that a later start can go on with it."""
        return self._run.id or self._resume_id

    def log(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        """See WandbRun."""
        if not self._run.is_open:
            return
        if step < self._next:
            if not self._held_back:
                logger.info("wandb has the steps before %d already; new values appear there from it on", self._next)
                self._held_back = True
            return
        if self._run.log(step, metrics):
            self._sent = step

    def rewind(self) -> None:
        """The run goes back: hold steps back until it has passed the last one sent."""
        if self._sent is not None:
            self._next = self._sent + 1
            self._held_back = False

    def close(self, exit_code: int) -> None:
        """See WandbRun."""
        self._run.close(exit_code)


class EvalWandb:
    """Results from another process than the training's, at any time and in any order of steps.

    They go to the training's wandb run where that is shared, else to one beside it, named `<run>-eval`; those that
    belong to no training, to a run named as theirs.
    """

    def __init__(
        self, config: WandbConfig, *, run_dir: Path, run_config: dict[str, Any], training_id: str | None
    ) -> None:
        """
        Args:
            config: `[monitors.wandb]` of the run.
            run_dir, run_config: see WandbRun.
            training_id: wandb run of the training; None where there is none.
        """
        online = config.resolved_mode == "online"
        joins = online and training_id is not None and is_shared(training_id)
        beside = None if training_id is None else f"{training_id}-eval"
        self._run = WandbRun(
            config,
            run_dir=run_dir,
            run_config=run_config,
            run_id=training_id if joins else beside,
            resume="must" if joins else "allow" if online and beside is not None else None,
            part="late" if joins else "only",
            any_order=True,
            must_start=False,
            suffix="" if joins or training_id is None else "-eval",
        )

    def log(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        """See WandbRun."""
        self._run.log(step, metrics)

    def close(self, exit_code: int) -> None:
        """See WandbRun."""
        self._run.close(exit_code)


def check_login(config: WandbConfig, *, must_start: bool, say: Callable[[str], None]) -> None:
    """Whether an online run will have a login, and a server that takes it. Asks nobody, and leaves no process.

    Args:
        config: `[monitors.wandb]`.
        must_start: otherwise a server that cannot be reached is only told to `say`.

    Raises:
        ConfigError: there is no login; or the server refuses it or cannot be reached, and wandb must start.
    """
    if config.resolved_mode == "offline":
        return
    settings = wandb.Settings(
        mode="online",
        silent=True,
        x_graphql_timeout_seconds=_LOGIN_SECONDS,
        x_graphql_retry_max=1,
        x_graphql_retry_wait_min_seconds=0.5,
        x_graphql_retry_wait_max_seconds=1,
    )
    wandb.setup(settings)
    try:
        if not wandb.login(prompt=False, verify=True):
            raise cannot_start(NO_LOGIN)
    except wandb.Error as error:
        if must_start:
            raise cannot_start(first_line(error)) from error
        say(f"wandb cannot start for now, the run goes on without it unless it can soon: {first_line(error)}")
    finally:
        wandb.teardown()
