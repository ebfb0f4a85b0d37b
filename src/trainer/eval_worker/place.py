"""The folder in which an eval-worker works: <run_dir>/eval_worker, one worker at a time."""

from collections.abc import Callable
from pathlib import Path

from configs.eval_worker import EvalWorkerConfig
from configs.launch import RUN_CONFIG
from configs.sft import SFTConfig
from trainer.attempts import Attempt, lay_out, refuse_living, take, unusable, write_config
from trainer.run import attempt_config
from trainer.run_dir import EVAL_WORKER, EVAL_WORKER_USE


def refuse_second(run_dir: Path) -> None:
    """
    Raises:
        ConfigError: another worker scores the run's snapshots; or the folder cannot be looked at.
    """
    folder = run_dir / EVAL_WORKER
    try:
        refuse_living(folder, EVAL_WORKER_USE)
    except OSError as error:
        raise unusable(folder, EVAL_WORKER_USE, error) from error


def open_place(config: EvalWorkerConfig, scored: SFTConfig, say: Callable[[str], None]) -> Attempt:
    """Lock the folder and lay out a new attempt, with both configs.

    Args:
        scored: what the workers build the model and the suite from: they get it by `scored_of`.

    Raises:
        ConfigError: another worker has it, or it cannot be written.
        RunError: it cannot be used for another reason, such as a full disk.
    """
    folder = config.run_dir / EVAL_WORKER
    try:
        folder.mkdir(exist_ok=True)
        lock = take(folder, EVAL_WORKER_USE, say)
        try:
            attempt = lay_out(folder, EVAL_WORKER_USE, config, lock)
            write_config(scored, attempt_config(folder, attempt.number, RUN_CONFIG.name))
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise unusable(folder, EVAL_WORKER_USE, error) from error
    return attempt


def scored_of(folder: Path, attempt: int) -> SFTConfig:
    """What `open_place` was given for the workers of an attempt."""
    return SFTConfig.model_validate_json(attempt_config(folder, attempt, RUN_CONFIG.name).read_text(encoding="utf-8"))
