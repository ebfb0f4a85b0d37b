"""A worker process of `eval-worker`: one rank, started by `trainer.launch`."""

import sys

from configs.eval_worker import EvalWorkerConfig
from trainer.run import Run
from trainer.run_dir import EVAL_WORKER_USE
from trainer.worker import run_worker


def _score_snapshots(config: EvalWorkerConfig, run: Run) -> None:
    # Imports torch, which takes seconds: signals are handled and the log is open by then.
    from trainer.eval_worker.work import score_snapshots

    score_snapshots(config, run)


if __name__ == "__main__":
    run_worker(_score_snapshots, sys.argv[1:], EvalWorkerConfig, EVAL_WORKER_USE.config_name)
