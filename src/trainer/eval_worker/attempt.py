"""The folder in which an eval-worker works: <run_dir>/eval_worker, one worker at a time."""

from collections.abc import Callable
from pathlib import Path

from configs.eval_worker import EvalWorkerConfig
from configs.sft import SFTConfig
from trainer.attempts import Attempt, lay_out, taken, write_config
from trainer.run import attempt_config
from trainer.run_dir import EVAL_WORKER, EVAL_WORKER_USE


def open_attempt(config: EvalWorkerConfig, scored: SFTConfig, say: Callable[[str], None]) -> Attempt:
    """Lock the folder and lay out a new attempt, with both configs.

    Args:
        scored: what the workers build the model and the suite from.

    Raises:
        ConfigError: another worker has it, or it cannot be written.
        RunError: it cannot be used for another reason, such as a full disk.
    """
    folder = config.run_dir / EVAL_WORKER
    with taken(folder, EVAL_WORKER_USE, say) as lock:
        attempt = lay_out(folder, scored, lock)
        write_config(config, _own_config(folder, attempt.number))
        return attempt


def read_own_config(folder: Path, attempt: int) -> EvalWorkerConfig:
    """The worker's own config, not that of what it scores."""
    return EvalWorkerConfig.model_validate_json(_own_config(folder, attempt).read_text(encoding="utf-8"))


def _own_config(folder: Path, attempt: int) -> Path:
    return attempt_config(folder, attempt).with_name("eval_worker.json")
