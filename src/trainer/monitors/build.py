"""All monitors of a run behind one call. Rank 0 alone has them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import ConfigError
from configs.sft import SFTConfig
from trainer.monitors.console import ConsoleMonitor
from trainer.monitors.jsonl import JsonlMonitor, append_late
from trainer.webhook import webhook_url

if TYPE_CHECKING:
    from trainer.monitors.wandb import EvalWandb, WandbMonitor


class Monitors:
    """Console, metrics.jsonl and, if configured, wandb.

    Several calls for one step are welcome as long as steps do not fall: the last value of a name counts, nothing else
    is lost. Only `rewind` goes back.
    """

    def __init__(
        self, *, start_step: int, console: ConsoleMonitor, jsonl: JsonlMonitor, wandb: "WandbMonitor | None"
    ) -> None:
        self._console = console
        self._jsonl = jsonl
        self._wandb = wandb
        self._step = start_step

    @property
    def wandb_id(self) -> str | None:
        """Id to keep in checkpoints, so that a resumed run goes on in the same wandb run. None without wandb."""
        return self._wandb.id if self._wandb is not None else None

    @property
    def recorded(self) -> frozenset[str]:
        """Names of the metrics that metrics.jsonl has for the step that the run goes on from."""
        return self._jsonl.recorded

    def log(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        """Record the metrics of a step: 0 before the first step, N after the N-th.

        Args:
            step: not below that of the call before.
            metrics: numbers, and text such as digests, by name; see docs/metrics.md.
        """
        if step < self._step:
            raise ValueError(f"metrics of step {step} after those of step {self._step}")
        self._step = step
        self._jsonl.log(step, metrics)
        self._console.log(step, metrics)
        if self._wandb is not None:
            self._wandb.log(step, metrics)

    def rewind(self, step: int) -> None:
        """The run has gone back to the checkpoint of `step`: what was recorded after it is taken out of metrics.jsonl.

        wandb cannot take steps back: it gets nothing until the run has passed the last step that wandb has.
        """
        self._step = step
        self._jsonl.rewind(step)
        self._console.rewind(step)
        if self._wandb is not None:
            self._wandb.rewind()

    def show_part(self, description: str, completed: int, total: int) -> None:
        """Show how far a long part of a step is, such as a validation; nothing is recorded."""
        self._console.show_part(description, completed, total)

    def close(self, exit_code: int = 0) -> None:
        """Write out what is pending and give the terminal back.

        Args:
            exit_code: that of the run; wandb shows any but 0 as failed.
        """
        self._console.close()
        self._jsonl.close()
        if self._wandb is not None:
            self._wandb.close(exit_code)


def build_monitors(
    config: SFTConfig,
    run_dir: Path,
    *,
    start_step: int,
    total_steps: int,
    wandb_id: str | None,
    starts_anew: bool = False,
) -> Monitors:
    """Open the monitors of a run, on rank 0.

    Args:
        config: the resolved config; wandb shows it.
        run_dir: an existing folder.
        start_step: steps done before this start; metrics.jsonl is cut back to it.
        total_steps: steps of the whole run.
        wandb_id: from the checkpoint that is resumed; None (also for a fork of another run) opens a new wandb run.
        starts_anew: what an earlier attempt recorded, step 0 included, is of other weights.

    Raises:
        ConfigError: wandb cannot start (see `check_monitors`).
        RunError: metrics.jsonl cannot be read or written.
    """
    jsonl = JsonlMonitor(run_dir / "metrics.jsonl", shared=config.eval_snapshots is not None)
    last_step = jsonl.cut_back(-1 if starts_anew else start_step)
    wandb = None
    if config.monitors.wandb is not None:
        _require_wandb()
        from trainer.monitors.wandb import WandbMonitor

        wandb = WandbMonitor(
            config.monitors.wandb,
            run_dir=run_dir,
            run_config=config.model_dump(mode="json"),
            resume_id=wandb_id,
            last_step=last_step,
            must_start=_must_start(config),
            shared=config.eval_snapshots is not None,
        )
    console = ConsoleMonitor(interval=config.log.interval, start_step=start_step, total_steps=total_steps)
    return Monitors(start_step=start_step, console=console, jsonl=jsonl, wandb=wandb)


class EvalMonitors:
    """Console, metrics.jsonl and, if configured, wandb, for what an evaluation outside of the training finds out.

    Nothing is cut back, steps may come in any order, and the run's training may write to the same places meanwhile.
    """

    def __init__(self, *, console: ConsoleMonitor, path: Path, wandb: "EvalWandb | None") -> None:
        self._console = console
        self._path = path
        self._wandb = wandb

    def log(
        self,
        step: int,
        metrics: Mapping[str, float | int | str],
        still_holds: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Record the metrics of a step.

        Args:
            still_holds: asked at a moment when the training cannot cut metrics.jsonl back before the line is in it:
                whether the weights are still those of the run's history.

        Returns:
            whether they were recorded.

        Raises:
            RunError: metrics.jsonl cannot be written.
        """
        if not append_late(self._path, step, metrics, still_holds):
            return False
        self._console.log(step, metrics)
        if self._wandb is not None:
            self._wandb.log(step, metrics)
        return True

    def show_part(self, description: str, completed: int, total: int) -> None:
        """As in `Monitors`."""
        self._console.show_part(description, completed, total)

    def close(self, exit_code: int = 0) -> None:
        """As in `Monitors`."""
        self._console.close()
        if self._wandb is not None:
            self._wandb.close(exit_code)


def open_eval_monitors(config: SFTConfig, run_dir: Path, wandb_id: str | None) -> EvalMonitors:
    """Open the monitors of an evaluation, on rank 0.

    Args:
        config: of the run.
        run_dir: its existing folder; metrics.jsonl need not be there.
        wandb_id: of the training that the results belong to, from the state of its checkpoint or snapshot. Where wandb
            takes no more than one process at a time, they go to a wandb run of their own, named `<run>-eval`.
    """
    wandb = None
    if config.monitors.wandb is not None:
        _require_wandb()
        from trainer.monitors.wandb import EvalWandb

        run_config = config.model_dump(mode="json")
        wandb = EvalWandb(config.monitors.wandb, run_dir=run_dir, run_config=run_config, training_id=wandb_id)
    console = ConsoleMonitor(interval=1, start_step=0, total_steps=None, description="scored step")
    return EvalMonitors(console=console, path=run_dir / "metrics.jsonl", wandb=wandb)


def check_monitors(config: SFTConfig, say: Callable[[str], None]) -> None:
    """Whether the monitors will start: of the webhook the URL; of wandb the package, the login and, for
    `mode = "online"`, the server.

    Takes 15 s at most when the server does not answer.

    Args:
        say: told when the server cannot be reached and the run may go on without it.

    Raises:
        ConfigError: a webhook has no URL, or wandb will not start. A run that is resumed needs only the package and
            the login: whoever or whatever restarts it, a service that is down should not keep it from training.
    """
    if config.monitors.webhook is not None:
        webhook_url(config.monitors.webhook)
    if config.monitors.wandb is None:
        return
    _require_wandb()
    from trainer.monitors.wandb import check_login

    check_login(config.monitors.wandb, must_start=_must_start(config), say=say)


def _require_wandb() -> None:
    """Half a second to import, for those who use it; and machines without a network may not have the package."""
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        message = f"the package wandb cannot be imported ({error}): install it, or give --no-monitors.wandb"
        raise ConfigError.one("monitors.wandb", message) from error


def _must_start(config: SFTConfig) -> bool:
    return config.resume is None or (config.resume.dir is not None and not config.resume.auto)
