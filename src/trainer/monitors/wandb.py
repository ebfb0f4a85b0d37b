"""Weights & Biases, online or offline. A run does not start without it when it was asked for; once started, trouble
with it never stops or holds up a run.

A resumed run goes on in the same wandb run. wandb takes steps in rising order only and silently drops the others, and
a run that resumes from an older checkpoint does some steps again: those are held back here, with a message, until the
run passes the last step that wandb has. metrics.jsonl has the repeated steps.
"""

import logging
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import wandb

from configs.errors import ConfigError
from configs.monitor import WandbConfig
from configs.safe_text import SECRET_NAME, star_secrets
from trainer.text import first_line

logger = logging.getLogger(__name__)

_LOGIN_SECONDS = 5
"""For one answer of the server, when the login is checked."""

_INIT_SECONDS = 60
_FINISH_SECONDS = 60
"""Far less than `deployment.stop_timeout_seconds`, after which a run that was asked to stop is killed."""

_FAILED_FINISH_SECONDS = 5
"""A rank that failed must soon say so, or its peers wait for it."""

_NO_LOGIN = "there is no login; log in by `wandb login`, or set WANDB_API_KEY"

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
        must_start: bool,
    ) -> None:
        """
        Args:
            config: `[monitors.wandb]`.
            run_dir: wandb writes into its folder `wandb`; its name is the run's.
            run_config: shown in wandb, less what looks like a secret.
            resume_id: wandb run to go on with; None opens a new one.
            last_step: last step that the resumed run recorded before it ended; None if it recorded none.
            must_start: otherwise a failure to start is only a warning.

        Raises:
            ConfigError: wandb cannot start and must.
        """
        self._run: wandb.Run | None = None
        self._id = resume_id
        self._sent: int | None = None
        """Last step that wandb has."""

        self._held_back = False
        self._next = 0
        """First step that wandb may get."""

        online = config.resolved_mode == "online"
        try:
            run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=config.name or run_dir.name,
                group=config.group,
                tags=config.tags,
                mode=config.resolved_mode,
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
                    finish_timeout_raises=True,
                ),
            )
        except Exception as error:  # network, login, server and disk faults come as every kind
            self._without(first_line(error), online=online, must_start=must_start)
            return
        if run.disabled:
            self._without(_NO_LOGIN, online=online, must_start=must_start)
            return
        self._run, self._id = run, run.id
        if resume_id is not None:
            # The server knows what it got. Offline, the run's own record is the best that is known.
            self._next = run.starting_step if online else 0 if last_step is None else last_step + 1
        logger.info("wandb run %s: %s", run.id, run.url if online else f"offline, in {run_dir / 'wandb'}")

    def _without(self, reason: str, *, online: bool, must_start: bool) -> None:
        if must_start:
            raise _cannot_start(reason) if online else ConfigError.one("monitors.wandb", f"cannot start: {reason}")
        hint = " (an offline part must be sent by `wandb sync` before it goes on online)" if self._id else ""
        logger.warning("wandb cannot start, the run goes on without it: %s%s", reason, hint)

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
        """Wait until the server has everything, a minute at most and a few seconds after a failure; the rest can be
        sent by `wandb sync`."""
        run, self._run = self._run, None
        if run is None:
            return
        finishing = threading.Thread(target=self._finish, args=(run, exit_code), name="wandb finish", daemon=True)
        finishing.start()
        finishing.join(_FAILED_FINISH_SECONDS if exit_code else None)

    def _finish(self, run: wandb.Run, exit_code: int) -> None:
        try:
            run.finish(exit_code=exit_code)
            # Offline, finish returns while wandb's own process still holds rows in memory, and a worker that ends
            # by os._exit would lose them.
            wandb.teardown(exit_code)
        except TimeoutError:
            folder = Path(run.dir).parent
            logger.warning(
                "wandb did not get all of the run in %d s; `wandb sync %s` sends it", _FINISH_SECONDS, folder
            )
        except Exception as error:  # as above
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        logger.warning("wandb failed, the run goes on without it: %s", error)
        self._run = None


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
            raise _cannot_start(_NO_LOGIN)
    except wandb.Error as error:
        if must_start:
            raise _cannot_start(first_line(error)) from error
        say(f"wandb cannot start for now, the run goes on without it unless it can soon: {first_line(error)}")
    finally:
        wandb.teardown()


def _cannot_start(reason: str) -> ConfigError:
    message = f'wandb cannot start: {reason}; mode = "offline" needs no server, and `wandb sync` sends its files later'
    return ConfigError.one("monitors.wandb.mode", message)


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
