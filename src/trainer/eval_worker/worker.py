"""A worker process of `eval-worker`: one rank, started by `trainer.launch`."""

import sys

from configs.sft import SFTConfig
from trainer.run import Run
from trainer.worker import run_worker


def _score_snapshots(scored: SFTConfig, run: Run) -> None:
    # Imports torch, which takes seconds: signals are handled and the log is open by then.
    from trainer.eval_worker.work import score_snapshots

    score_snapshots(scored, run)


if __name__ == "__main__":
    run_worker(_score_snapshots, sys.argv[1:])
