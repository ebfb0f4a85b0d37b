"""The training run's side of the snapshots: when they are due, writing them, and deleting those it no longer stands by.

A snapshot is a checkpoint without the optimizer: the same files and the same commit, through the same thread and from
the same copies of the weights. Its state holds `model`, as a checkpoint's does, and `wandb_id`.
"""

import logging
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from configs.sft import SFTConfig
from trainer.checkpoint import Checkpointer, ModelRecord, checkpoint_size
from trainer.checkpoint.agreement import on_rank_0
from trainer.errors import RunError
from trainer.files import require_space
from trainer.parallel.mesh import Mesh
from trainer.snapshots import queue
from trainer.state import TrainState
from trainer.text import listed

logger = logging.getLogger(__name__)


class SnapshotWriter:
    """Writes one run's snapshots. All methods but `due` are collective: every rank calls them, in the same order, and
    all raise when one fails."""

    def __init__(
        self,
        run_dir: Path,
        config: SFTConfig,
        state: TrainState,
        checkpointer: Checkpointer,
        mesh: Mesh,
        model: ModelRecord,
        *,
        total_steps: int,
    ) -> None:
        """
        Args:
            config: without `[eval_snapshots]` none are written; those that an earlier attempt left ahead are deleted
                all the same.
            state: the weights.
            checkpointer: its thread writes the snapshots too, in the background where it writes checkpoints so.
            model: what every snapshot says about itself.
            total_steps: of the run: after these comes the last snapshot.
        """
        self._run_dir = run_dir
        self._config = config.eval_snapshots
        self._state = state
        self._checkpointer = checkpointer
        self._writer = checkpointer.writer
        self._mesh = mesh
        self._model = model
        self._total_steps = total_steps
        self._beside_checkpoints = config.ckpt is not None
        self._in_background = config.ckpt is None or config.ckpt.async_save

    def due(self, step: int) -> bool:
        """Whether the weights after `step` steps are to be written."""
        return self._config is not None and (
            step == self._total_steps or (step > 0 and step % self._config.interval == 0)
        )

    def check_space(self) -> None:
        """Check at start that one snapshot fits, beside a checkpoint if these are written.

        Raises:
            RunError: it does not.
        """
        if self._config is None:
            return
        num_bytes, what = self._size(), "a snapshot"
        if self._beside_checkpoints:
            num_bytes += self._checkpointer.size(self._state.tensors())
            what += " and a checkpoint"
        on_rank_0(self._mesh, lambda: require_space(self._run_dir / queue.FOLDER_NAME, num_bytes, what))

    def go_on_from(self, step: int) -> None:
        """The run goes on from `step`, at its start or because it went back: the snapshots of later steps are deleted.
        Called before metrics.jsonl is cut back, so that no worker can record what it scored of them afterwards, and
        while nothing is being written.

        Raises:
            RunError: the folder of the snapshots cannot be changed.
        """

        def clean_up() -> None:
            queue.clear_leftovers(self._run_dir)
            steps = queue.cut_back(self._run_dir, step)
            if steps:
                logger.info("snapshots after step %d are of other weights now: deleted %s", step, _names(steps))
            if self._config is not None:
                (self._run_dir / queue.FOLDER_NAME).mkdir(parents=True, exist_ok=True)
                if step < self._total_steps:
                    queue.unmark_final(self._run_dir)
            elif (self._run_dir / queue.FOLDER_NAME).is_dir():
                queue.mark_final(self._run_dir, step)  # a worker that is alive would wait for more

        on_rank_0(self._mesh, clean_up)

    def save(self, step: int, wandb_id: str | None) -> dict[str, float]:
        """Write the weights after `step` steps. In the background this returns when the tensors are copied, at once if
        the checkpoint of the step has copied them.

        Args:
            wandb_id: where results belong; rank 0's is written.

        Returns:
            the time that it took.

        Raises:
            RunError: writing before this one failed, or this one did, if not in the background.
        """
        start = time.perf_counter()
        staged = self._writer.stage(step, self._state.model_tensors())
        state = {"model": self._model.to_json(), "wandb_id": wandb_id}
        self._writer.do(lambda: self._write(step, staged, state), in_background=self._in_background)
        return {"time/save_snapshot": time.perf_counter() - start}

    def make_up(self, step: int, wandb_id: str | None, *, scored: bool) -> None:
        """Write what is due of the step that the run was resumed from, if the run was killed before it could.

        Args:
            scored: its results are recorded, so it was there.

        Raises:
            RunError: as `save`.
        """
        if not self.due(step):
            return
        self._writer.wait()
        if not (scored or on_rank_0(self._mesh, lambda: queue.was_written(self._run_dir, step))):
            self.save(step, wandb_id)
        elif step == self._total_steps:
            on_rank_0(self._mesh, lambda: queue.mark_final(self._run_dir, step))

    def _size(self) -> int:
        return checkpoint_size(self._state.model_tensors(), self._mesh.world_size)

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        path = queue.snapshot_path(self._run_dir, step)
        num_bytes = checkpoint_size(tensors, self._mesh.world_size)
        try:
            self._writer.write(
                path, step=step, tensors=tensors, state=state, before_writing=lambda: self._make_room(num_bytes)
            )
            if step == self._total_steps:
                on_rank_0(self._mesh, lambda: queue.mark_final(self._run_dir, step))
        except RunError as error:
            raise RunError(f"snapshot step_{step} could not be written to {path.parent}: {error}") from error

    def _make_room(self, num_bytes: int) -> None:
        assert self._config is not None, "none are due"
        most = self._config.max_waiting
        dropped = queue.discard_oldest(self._run_dir, most - 1)
        if dropped:
            logger.warning(
                "eval_snapshots.max_waiting = %d: %s will not be scored: deleted before eval-worker took it",
                most,
                _names(dropped),
            )
        require_space(self._run_dir / queue.FOLDER_NAME, num_bytes, "a snapshot")


def _names(steps: list[int]) -> str:
    return listed([f"step_{step}" for step in steps])
