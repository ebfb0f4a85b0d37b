"""`eval-worker`: scores the snapshots of a training run. Checks everything first, then starts the workers and waits."""

import sys
from typing import TYPE_CHECKING

from trainer.command import launch_attempt, run_command, say

if TYPE_CHECKING:
    from configs.eval_worker import EvalWorkerConfig

WORKER_COMMAND = (sys.executable, "-P", "-m", "trainer.eval_worker.worker")


def main() -> None:
    """Entry point of the command."""
    code = run_eval_worker(sys.argv[1:])
    from trainer.run import ignore_stop_signals

    ignore_stop_signals()
    sys.exit(code)


def run_eval_worker(argv: list[str]) -> int:
    """Score as the command line says.

    Returns:
        exit code: 0 the training's last snapshot is scored, or stopped as asked; 1 failed, 2 the config cannot run,
            128 + n killed after signal n.
    """
    return run_command("eval-worker", _config_class, _start_unless_ended, argv)


def _config_class() -> type["EvalWorkerConfig"]:
    from configs.eval_worker import EvalWorkerConfig

    return EvalWorkerConfig


def _start_unless_ended(config: "EvalWorkerConfig") -> int:
    from trainer.launch import ended_by_signals

    with ended_by_signals():
        return _start(config)


def _start(config: "EvalWorkerConfig") -> int:
    from trainer.attempts import refuse_living
    from trainer.eval_worker.attempt import open_attempt
    from trainer.eval_worker.training import await_training, scored_config
    from trainer.launch import count_workers
    from trainer.run_dir import EVAL_WORKER, EVAL_WORKER_USE

    training = await_training(config, say)
    refuse_living(config.run_dir / EVAL_WORKER, EVAL_WORKER_USE)
    scored = scored_config(config, training)
    num_workers = count_workers(config.deployment)
    # Imports models and transformers, which take seconds.
    from trainer.preflight import preflight_scoring

    lines = preflight_scoring(scored, run_dir=config.run_dir, world_size=num_workers, say=say, has_checkpoint=False)
    for line in lines:
        say(line)
    attempt = open_attempt(config, scored, say)
    say(f"eval-worker: {attempt.dir}, attempt {attempt.number}")
    return launch_attempt(attempt, config.deployment, num_workers, WORKER_COMMAND)
