"""What a worker of `eval-worker` does: the model is built once, then snapshot after snapshot is put in and scored.

The newest waiting snapshot goes first, older ones when nothing newer waits: whoever watches a run wants to know how it
does now. Rank 0 looks and claims; all ranks agree on what is next, so that none is left alone in a collective.
"""

import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from configs.eval_worker import EvalWorkerConfig
from configs.sft import SFTConfig
from trainer.checkpoint import read_state
from trainer.checkpoint.agreement import agree, on_rank_0
from trainer.errors import RunError
from trainer.eval_worker.attempt import read_own_config
from trainer.evaluate import Evaluator
from trainer.heartbeat import Phase
from trainer.monitors import EvalMonitors, open_eval_monitors
from trainer.parallel.mesh import Mesh, build_mesh
from trainer.parallel.stop_votes import StopVotes
from trainer.run import Run
from trainer.snapshots import queue
from trainer.text import listed

log = logging.getLogger(__name__)

_STOP_SECONDS = 0.1
"""How long a stop signal may go unheeded between two looks."""


@dataclass(frozen=True, kw_only=True)
class _Look:
    """What a rank knows at a look."""

    stop: bool
    step: int | None = None
    """Of the snapshot that rank 0 has claimed."""

    is_over: bool = False
    """Nothing waits, and nothing more will come."""


def score_snapshots(scored: SFTConfig, run: Run) -> None:
    """Score the snapshots of a run until its last one is scored, or a signal asks to stop. Called in every worker.

    Args:
        scored: see `trainer.eval_worker.training.scored_config`.

    Raises:
        ConfigError: what the configs point to cannot be used.
        RunError: the work failed for a reason that can be named.
    """
    config = read_own_config(run.dir, run.attempt)
    worker = SnapshotScorer(config, scored, run, build_mesh(scored.deployment.timeout_seconds))
    try:
        worker.run()
    except BaseException:
        # Nothing here may wait for other ranks, as in `train`.
        worker.close_monitors(exit_code=1)
        raise
    worker.close_monitors(exit_code=0)


class SnapshotScorer:
    """One rank of an eval-worker. `run` is collective."""

    def __init__(self, config: EvalWorkerConfig, scored: SFTConfig, run: Run, mesh: Mesh) -> None:
        """Arguments as in `score_snapshots`."""
        self._config, self._scored, self._run, self._mesh = config, scored, run, mesh
        self._run_dir = config.run_dir
        self._evaluator = Evaluator(scored, config.run_dir, mesh)
        # Of rank 0 alone:
        self._last_result = time.monotonic()
        self._num_recorded = 0
        self._failed: list[int] = []
        self._monitors: EvalMonitors | None = None
        self._wandb_id: str | None = None

    def run(self) -> None:
        """Until the training's last snapshot is scored, or a stop is asked for.

        Raises:
            RunError: also where a snapshot could not be loaded, when all others are scored.
        """
        for note in self._evaluator.notes:
            log.info(note)
        on_rank_0(self._mesh, self._put_back)
        log.info("waiting for snapshots in %s", self._run_dir / queue.FOLDER_NAME)
        while True:
            self._run.heartbeat.beat(Phase.WAITING_FOR_SNAPSHOT)
            looks = agree(self._mesh, self._look)
            stop = any(look.stop for look in looks)
            if stop or looks[0].is_over:
                break
            if looks[0].step is not None:
                self._score(looks[0].step)
            else:
                self._pause()
        on_rank_0(self._mesh, lambda: self._end(stop))

    def _put_back(self) -> None:
        """What was claimed and not scored waits again."""
        for step in queue.put_back(self._run_dir):
            log.info("the snapshot of step %d waits again", step)

    def _look(self) -> _Look:
        if self._run.stop.requested or self._mesh.rank > 0:
            return _Look(stop=self._run.stop.requested)
        is_over = queue.is_over(self._run_dir)  # before what waits, see queue
        steps = queue.waiting(self._run_dir)
        for step in reversed(steps):
            if queue.claim(self._run_dir, step) is not None:
                return _Look(stop=False, step=step)
        most = self._config.max_idle_minutes
        if not is_over and most is not None and time.monotonic() - self._last_result > 60 * most:
            raise RunError(
                f"no snapshot has come for max_idle_minutes = {most:g}, and the training in {self._run_dir} has not "
                "written its last one"
            )
        return _Look(stop=False, is_over=is_over and not steps)

    def _pause(self) -> None:
        until = time.monotonic() + self._config.poll_seconds
        while not self._run.stop.requested and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _STOP_SECONDS))

    def _score(self, step: int) -> None:
        """Score a claimed snapshot and record the result. When a stop is asked for meanwhile it stays claimed."""
        path = queue.claimed_path(self._run_dir, step)
        self._run.heartbeat.beat(Phase.LOADING, step)
        try:
            self._evaluator.load(path)
            on_rank_0(self._mesh, lambda: self._open_monitors(read_state(path)["wandb_id"]))
        except RunError as error:  # on every rank
            reason = str(error)
            on_rank_0(self._mesh, lambda: self._pass_over(step, path, reason))
            return
        start = time.perf_counter()
        on_progress = partial(self._monitors.show_part, f"step {step}") if self._monitors is not None else None
        votes = StopVotes(self._mesh, lambda: self._run.stop.requested)
        leave = self._run.heartbeat.before(votes.cast, Phase.VALIDATION)
        metrics = self._evaluator.score(step, leave=leave, on_progress=on_progress)
        votes.settle()
        if metrics is not None:
            result = {**metrics, "time/eval": time.perf_counter() - start}
            on_rank_0(self._mesh, lambda: self._record(step, path, result))

    def _record(self, step: int, path: Path, metrics: dict[str, float]) -> None:
        assert self._monitors is not None, "opened when the weights were loaded"
        # The training deletes claimed snapshots too, before it cuts the record back.
        if self._monitors.log(step, metrics, path.is_dir):
            self._num_recorded += 1
        else:
            log.info("step %d: not recorded, the training has gone back behind it", step)
        queue.discard(path)
        self._last_result = time.monotonic()

    def _pass_over(self, step: int, path: Path, reason: str) -> None:
        """It could not be loaded. It stays claimed, so that it is not tried again, until this worker ends."""
        if path.is_dir():
            log.warning("the snapshot of step %d is passed over: %s", step, reason)
            self._failed.append(step)
        else:
            log.info("step %d: passed over, the training has gone back behind it", step)

    def _end(self, stop: bool) -> None:
        self._put_back()
        if self._failed:
            names = listed([str(queue.snapshot_path(self._run_dir, step)) for step in self._failed])
            raise RunError(f"snapshots that could not be loaded have no result: {names}; delete them to go on without")
        why = "stopped on request" if stop else "done: the last snapshot of the training is scored"
        log.info("%s; scored by this worker: %d", why, self._num_recorded)

    def _open_monitors(self, wandb_id: str | None) -> None:
        """Have monitors for results of the training that wrote to this wandb run."""
        if self._monitors is not None and wandb_id == self._wandb_id:
            return
        self.close_monitors(exit_code=0)
        self._wandb_id = wandb_id
        self._monitors = open_eval_monitors(self._scored, self._run_dir, wandb_id)

    def close_monitors(self, exit_code: int) -> None:
        """Write out what is pending."""
        if self._monitors is not None:
            self._monitors.close(exit_code)
            self._monitors = None
