"""`eval-worker`: scores the snapshots of a training run. Checks everything first, then starts the workers and waits."""

import sys
from typing import TYPE_CHECKING

from trainer.command import fail, run_command, say

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
    from trainer.eval_worker.place import open_place, refuse_second
    from trainer.eval_worker.training import await_training, check_snapshots, choose_suite

    training = await_training(config, say)
    refuse_second(config.run_dir)
    check_snapshots(config.run_dir, training)
    config = choose_suite(config, training)
    from trainer.launch import KilledError, WorkerError, count_workers, launch

    num_workers = count_workers(config.deployment)
    # Imports models and transformers, which take seconds.
    from trainer.eval_worker.check import check_scored, scored_config

    scored = scored_config(config, training)
    for line in check_scored(scored, world_size=num_workers, say=say):
        say(line)
    attempt = open_place(config, scored, say)
    say(f"eval-worker: {attempt.dir}, attempt {attempt.number}")
    try:
        launch(
            attempt,
            num_workers=num_workers,
            stop_timeout=config.deployment.stop_timeout_seconds,
            say=say,
            command=WORKER_COMMAND,
            stopping="stopping; a snapshot that is being scored will wait again",
        )
    except WorkerError as error:
        return fail(str(error), 1)
    except KilledError as error:
        return fail(str(error), 128 + error.signum)
    finally:
        attempt.close()
    return 0
