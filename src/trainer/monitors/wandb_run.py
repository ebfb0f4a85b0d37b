"""One run of Weights & Biases, online or offline, whose troubles never stop or hold up a run of ours.

A second process that logs to a run in use overwrites its rows, unless both open it in wandb's mode "shared", and the
server takes that mode from the run's first process or never. So a run online with `[eval_snapshots]` is opened in it,
and its id says so to whoever logs to it later (`is_shared`). wandb then counts rows itself; the step is a metric, and
the axis of all others. The definitions of the last process that sent its own hold, so all must define the same.
"""

import logging
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import wandb

from configs.errors import ConfigError
from configs.monitor import WandbConfig
from configs.safe_text import SECRET_NAME, star_secrets
from trainer.text import first_line

logger = logging.getLogger(__name__)

_INIT_SECONDS = 60
_FINISH_SECONDS = 60
"""Far less than `deployment.stop_timeout_seconds`, after which a run that was asked to stop is killed."""

_FAILED_FINISH_SECONDS = 5
"""A rank that failed must soon say so, or its peers wait for it."""

NO_LOGIN = "there is no login; log in by `wandb login`, or set WANDB_API_KEY"

_ASSIGNED_SECRET = re.compile(r"\b(\w*(?:KEY|TOKEN|SECRET|PASSWORD))=(\"[^\"]*\"|'[^']*'|[^\s;&|]+)")

SHARED = "-shared"
"""End of the id of a run in mode "shared"."""

STEP = "step"
"""The step's name where it is a metric."""


def is_shared(run_id: str) -> bool:
    """Several processes may log to the wandb run at a time, steps in any order."""
    return run_id.endswith(SHARED)


class WandbRun:
    """One wandb run, or none after a failure."""

    def __init__(
        self,
        config: WandbConfig,
        *,
        run_dir: Path,
        run_config: dict[str, Any],
        run_id: str | None,
        resume: Literal["must", "allow"] | None,
        part: Literal["only", "first", "late"],
        any_order: bool,
        must_start: bool,
        suffix: str = "",
    ) -> None:
        """
        Args:
            config: `[monitors.wandb]`.
            run_dir: wandb writes into its folder `wandb`; its name is the run's.
            run_config: shown in wandb, less what looks like a secret.
            run_id: None opens a new one.
            resume: whether it must exist already, or may.
            part: "only" where no other process logs to it meanwhile; in a shared run "first" is the one that opens it
                and says how it ended, "late" any other.
            any_order: steps come in any order, or from two processes: the step is then a metric, and the axis of all
                others.
            must_start: otherwise a failure to start is only a warning.
            suffix: after the name.

        Raises:
            ConfigError: wandb cannot start and must.
        """
        self._run: wandb.Run | None = None
        self._any_order = any_order
        self.id: str | None = None
        """Of the wandb run, once it is open."""

        online = config.resolved_mode == "online"
        try:
            run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=(config.name or run_dir.name) + suffix,
                group=config.group,
                tags=config.tags,
                mode=config.resolved_mode if part == "only" else "shared",
                dir=run_dir,
                config=without_secrets(run_config),
                id=run_id,
                resume=resume,
                reinit="create_new",
                settings=wandb.Settings(
                    # The run has logs of its own; wandb's capture would take the bar's output too.
                    console="off",
                    silent=True,
                    disable_code=True,
                    init_timeout=_INIT_SECONDS,
                    finish_timeout=_FINISH_SECONDS,
                    finish_timeout_raises=True,
                    x_primary=part != "late",
                    x_update_finish_state=part != "late",
                ),
            )
            if any_order and not run.disabled:
                run.define_metric(STEP)
                run.define_metric("*", step_metric=STEP)
        except Exception as error:  # network, login, server and disk faults come as every kind
            self._without(first_line(error), online=online, must_start=must_start, run_id=run_id)
            return
        if run.disabled:
            self._without(NO_LOGIN, online=online, must_start=must_start, run_id=run_id)
            return
        self._run, self.id = run, run.id
        logger.info("wandb run %s: %s", run.id, run.url if online else f"offline, in {run_dir / 'wandb'}")

    def _without(self, reason: str, *, online: bool, must_start: bool, run_id: str | None) -> None:
        if must_start:
            raise cannot_start(reason) if online else ConfigError.one("monitors.wandb", f"cannot start: {reason}")
        hint = " (an offline part must be sent by `wandb sync` before it goes on online)" if run_id else ""
        logger.warning("wandb cannot start, the run goes on without it: %s%s", reason, hint)

    @property
    def is_open(self) -> bool:
        """wandb works, so far."""
        return self._run is not None

    @property
    def starting_step(self) -> int:
        """First step that the server will take."""
        return 0 if self._run is None else self._run.starting_step

    def log(self, step: int, metrics: Mapping[str, float | int | str]) -> bool:
        """Send the numbers of a step; whether wandb took them. Text (digests) stays in metrics.jsonl."""
        if self._run is None:
            return False
        row = {name: value for name, value in metrics.items() if not isinstance(value, str)}
        try:
            if self._any_order:
                self._run.log({STEP: step, **row})
            else:
                self._run.log(row, step=step)
        except Exception as error:  # as above
            self._give_up(error)
            return False
        return True

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


def cannot_start(reason: str) -> ConfigError:
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
