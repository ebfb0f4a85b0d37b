"""What a worker of `eval-worker` does: the model is built once, then snapshot after snapshot is put in and scored.

The newest waiting snapshot goes first, older ones when nothing newer waits: whoever watches a run wants to know how it
does now. Rank 0 looks and claims; all ranks agree on what is next, so that none is left alone in a collective.
"""

import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from configs.errors import ConfigError
from configs.eval_worker import EvalWorkerConfig
from configs.sft import SFTConfig
from trainer.checkpoint import read_state
from trainer.checkpoint.agreement import agree
from trainer.checkpoint.safe_reader import DamagedError
from trainer.errors import PeerError, RunError
from trainer.eval_worker.damage import find_damage
from trainer.eval_worker.place import scored_of
from trainer.eval_worker.silence import Silence
from trainer.evaluate import Evaluator
from trainer.monitors import LateMonitors, open_late_monitors
from trainer.parallel.mesh import Mesh, build_mesh
from trainer.parallel.stop_votes import StopVotes
from trainer.run import Run
from trainer.snapshots import queue
from trainer.text import listed

log = logging.getLogger(__name__)

_STOP_SECONDS = 0.1
"""How long a stop signal may go unheeded between two looks."""

_State = Literal["whole", "damaged", "gone"]


@dataclass(frozen=True, kw_only=True)
class _Look:
    """What a rank knows at a look."""

    stop: bool
    step: int | None = None
    """Of the snapshot that rank 0 has claimed."""

    is_over: bool = False
    """Nothing waits, and nothing more will come."""


def score_snapshots(config: EvalWorkerConfig, run: Run) -> None:
    """Score the snapshots of a run until its last one is scored, or a signal asks to stop. Called in every worker.

    Raises:
        ConfigError: what the configs point to cannot be used.
        RunError: the work failed for a reason that can be named.
    """
    worker = SnapshotScorer(config, scored_of(run.dir, run.attempt), run, build_mesh(config.deployment.timeout_seconds))
    try:
        worker.run()
    except BaseException:
        # Nothing here may wait for other ranks, as in `train`.
        worker.close_monitors(exit_code=1)
        raise
    worker.close_monitors(exit_code=0)


class SnapshotScorer:
    """One rank of an eval-worker. All methods but `close_monitors` are collective."""

    def __init__(self, config: EvalWorkerConfig, scored: SFTConfig, run: Run, mesh: Mesh) -> None:
        """
        Args:
            scored: see `trainer.eval_worker.check.scored_config`.
        """
        self._run_dir, self._poll_seconds, self._run, self._mesh = config.run_dir, config.poll_seconds, run, mesh
        self._scored = scored
        self._evaluator = Evaluator(scored, config.run_dir, mesh, from_checkpoints=True)
        self._silence = Silence(config.run_dir, config.max_idle_minutes)
        self._num_recorded = 0
        self._damaged: list[int] = []
        self._monitors: LateMonitors | None = None
        self._wandb_id: str | None = None

    def run(self) -> None:
        """Until the training's last snapshot is scored, or a stop is asked for.

        Raises:
            RunError: also where a snapshot was damaged, when all others are scored.
        """
        for note in self._evaluator.notes:
            log.info(note)
        agree(self._mesh, self._put_back)
        log.info("waiting for snapshots in %s", self._run_dir / queue.FOLDER_NAME)
        while True:
            looks = agree(self._mesh, self._look)
            stop = any(look.stop for look in looks)
            if stop or looks[0].is_over:
                break
            if looks[0].step is not None:
                self._score(looks[0].step)
            else:
                self._pause()
        agree(self._mesh, self._put_back)
        if self._damaged:
            raise RunError(
                f"snapshots of steps {listed([str(step) for step in self._damaged])} were damaged and have no result"
            )
        why = "stopped on request" if stop else "done: the last snapshot of the training is scored"
        log.info("%s; scored by this worker: %d", why, self._num_recorded)

    def _put_back(self) -> None:
        """What was claimed and not scored waits again."""
        if self._mesh.rank == 0:
            for step in queue.put_back(self._run_dir):
                log.info("the snapshot of step %d waits again", step)

    def _look(self) -> _Look:
        if self._run.stop.requested or self._mesh.rank > 0:
            return _Look(stop=self._run.stop.requested)
        # Before what waits, see queue. A run without the table has left what it has left.
        is_over = queue.is_over(self._run_dir) or self._scored.eval_snapshots is None
        steps = queue.waiting(self._run_dir)
        for step in reversed(steps):
            if queue.claim(self._run_dir, step) is not None:
                return _Look(stop=False, step=step)
        if not steps and not is_over:
            self._silence.heed()
        return _Look(stop=False, is_over=is_over and not steps)

    def _pause(self) -> None:
        until = time.monotonic() + self._poll_seconds
        while not self._run.stop.requested and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _STOP_SECONDS))

    def _score(self, step: int) -> None:
        """Score a claimed snapshot and record the result. When a stop is asked for meanwhile it stays claimed."""
        path = queue.claimed_path(self._run_dir, step)
        if not self._load(step, path):
            return
        start = time.perf_counter()
        on_progress = partial(self._monitors.show_part, f"step {step}") if self._monitors is not None else None
        votes = StopVotes(self._mesh, lambda: self._run.stop.requested)
        metrics = self._evaluator.score(step, leave=votes.cast, on_progress=on_progress)
        votes.settle()
        if metrics is not None:
            result = {**metrics, "time/eval": time.perf_counter() - start}
            agree(self._mesh, lambda: self._record(step, path, result))

    def _record(self, step: int, path: Path, metrics: dict[str, float]) -> None:
        if self._monitors is None:
            return
        # The training deletes claimed snapshots too, before it cuts the record back.
        if self._monitors.log(step, metrics, path.is_dir):
            self._num_recorded += 1
        else:
            log.info("step %d: not recorded, the training has gone back behind it", step)
        queue.discard(path)
        self._silence.end()

    def _load(self, step: int, path: Path) -> bool:
        """Put a snapshot's weights in, and open the monitors; False when it is passed over."""
        failure = None
        try:
            self._evaluator.load(path)
        except (ConfigError, RunError, DamagedError) as error:
            failure = error
        failed = any(agree(self._mesh, lambda: failure is not None))
        state = agree(self._mesh, lambda: self._find_out(step, path, failed))[0]
        if state == "whole" and failed:
            # Of another model than the config says, say: so will the others be.
            raise failure or PeerError(f"another rank could not load {path}")
        return state == "whole"

    def _find_out(self, step: int, path: Path, failed: bool) -> _State | None:
        """On rank 0: what became of a claimed snapshot, after a try to load it."""
        if self._mesh.rank > 0:
            return None
        fault = find_damage(path) if failed else None
        if not failed:
            try:
                self._open_monitors(read_state(path).get("wandb_id"))
            except RunError as error:  # of its state, after it was loaded
                fault = str(error)
        if not path.is_dir():
            log.info("step %d: passed over, the training has gone back behind it", step)
            return "gone"
        if fault is None:
            return "whole"
        log.warning("the snapshot of step %d is damaged, passed over and deleted: %s", step, fault)
        self._damaged.append(step)
        queue.discard(path)
        return "damaged"

    def _open_monitors(self, wandb_id: str | None) -> None:
        """Have monitors for results of the training that wrote to this wandb run."""
        if self._monitors is not None and wandb_id == self._wandb_id:
            return
        self.close_monitors(exit_code=0)
        self._wandb_id = wandb_id
        self._monitors = open_late_monitors(self._scored, self._run_dir, wandb_id)

    def close_monitors(self, exit_code: int) -> None:
        """Write out what is pending."""
        if self._monitors is not None:
            self._monitors.close(exit_code)
            self._monitors = None
