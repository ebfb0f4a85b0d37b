"""Weights & Biases, online or offline. Trouble with it never stops a run.

A resumed run goes on in the same wandb run. wandb takes steps in rising order only and silently drops the others, and
a run that resumes from an older checkpoint does some steps again: those are held back here, with a message, until the
run passes the last step that wandb has. metrics.jsonl has the repeated steps.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from configs.monitor import WandbConfig
from configs.safe_text import SECRET_NAME, star_secrets

logger = logging.getLogger(__name__)

_LOGIN_SECONDS = 30
_INIT_SECONDS = 90
_FINISH_SECONDS = 300

_ASSIGNED_SECRET = re.compile(r"\b(\w*(?:KEY|TOKEN|SECRET|PASSWORD))=(\"[^\"]*\"|'[^']*'|[^\s;&|]+)")


class WandbMonitor:
    """One wandb run, or none after a failure."""

    def __init__(
        self,
        config: WandbConfig,
        *,
        run_dir: Path,
        run_config: dict[str, Any],
        resume_id: str | None,
        last_step: int | None,
    ) -> None:
        """
        Args:
            config: `[monitors.wandb]`.
            run_dir: wandb writes into its folder `wandb`; its name is the run's.
            run_config: shown in wandb, less what looks like a secret.
            resume_id: wandb run to go on with; None opens a new one.
            last_step: last step that the resumed run recorded before it ended; None if it recorded none.
        """
        self._run: wandb.Run | None = None
        self._id = resume_id
        self._sent: int | None = None
        """Last step that wandb has."""

        self._held_back = False
        self._next = 0
        """First step that wandb may get."""

        online = config.mode == "online"
        try:
            # Without an API key wandb asks for one on a terminal, without end unless told.
            wandb.setup(wandb.Settings(login_timeout=_LOGIN_SECONDS))
            run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=config.name or run_dir.name,
                group=config.group,
                tags=config.tags,
                mode=config.mode,
                dir=run_dir,
                config=without_secrets(run_config),
                id=resume_id,
                # Offline there is nothing to look up: the same id makes `wandb sync` put both parts in one run.
                resume="must" if resume_id is not None and online else None,
                reinit="create_new",
                settings=wandb.Settings(
                    # The run has logs of its own; wandb's capture would take the bar's output too.
                    console="off",
                    silent=True,
                    disable_code=True,
                    init_timeout=_INIT_SECONDS,
                    finish_timeout=_FINISH_SECONDS,
                ),
            )
        except Exception as error:  # network, login, server and disk faults come as every kind
            hint = " (an offline part must be sent by `wandb sync` before it goes on online)" if resume_id else ""
            logger.warning("wandb cannot start, the run goes on without it: %s%s", error, hint)
            return
        if run.disabled:
            logger.warning("wandb is not logged in, the run goes on without it; log in with `wandb login`")
            return
        self._run, self._id = run, run.id
        if resume_id is not None:
            # The server knows what it got. Offline, the run's own record is the best that is known.
            self._next = run.starting_step if online else 0 if last_step is None else last_step + 1
        logger.info("wandb run %s: %s", run.id, run.url if online else f"offline, in {run_dir / 'wandb'}")

    @property
    def id(self) -> str | None:
        """Id of the wandb run; the resumed one even while wandb fails, so that a later start can go on with it."""
        return self._id

    def log(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        """Send the numbers. Text (digests) stays in metrics.jsonl."""
        if self._run is None:
            return
        if step < self._next:
            if not self._held_back:
                logger.info("wandb has the steps before %d already; new values appear there from it on", self._next)
                self._held_back = True
            return
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, str)}
        try:
            self._run.log(numbers, step=step)
        except Exception as error:  # as above
            self._give_up(error)
            return
        self._sent = step

    def rewind(self) -> None:
        """The run goes back: hold steps back until it has passed the last one sent."""
        if self._sent is not None:
            self._next = self._sent + 1
            self._held_back = False

    def close(self, exit_code: int) -> None:
        """Wait until the server has everything, five minutes at most; the rest can be sent by `wandb sync`."""
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=exit_code)
            # Offline, finish returns while wandb's own process still holds rows in memory, and a worker that ends
            # by os._exit would lose them.
            wandb.teardown(exit_code)
        except Exception as error:  # as above
            self._give_up(error)
        self._run = None

    def _give_up(self, error: Exception) -> None:
        logger.warning("wandb failed, the run goes on without it: %s", error)
        self._run = None


def without_secrets(value: Any, name: str = "") -> Any:
    """A copy of JSON-able `value` with "***" for what looks like a secret.

    That is: text whose key names one (`api_key`, `hf_token`, `password`), the value in `SOME_KEY=value` within text,
    and what `configs.safe_text.star_secrets` takes out.
    """
    if isinstance(value, dict):
        return {key: without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [without_secrets(item, name) for item in value]
    if not isinstance(value, str):
        return value
    if SECRET_NAME.search(name):
        return "***"
    return star_secrets(_ASSIGNED_SECRET.sub(r"\1=***", value))
