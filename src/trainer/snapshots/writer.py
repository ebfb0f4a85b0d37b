"""The training run's side of the snapshots: when they are due, writing them, and deleting those it no longer stands by.

A snapshot is a checkpoint without the optimizer: the same files and the same commit, through the same thread and from
the same copies of the weights. Its state holds `model`, as a checkpoint's does, and `wandb_id`.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from configs.checkpoint import EvalSnapshotsConfig
from trainer.checkpoint import ModelRecord, checkpoint_size
from trainer.checkpoint.agreement import agree
from trainer.checkpoint.folder_writer import FolderWriter
from trainer.errors import RunError
from trainer.files import require_space
from trainer.parallel.mesh import Mesh
from trainer.snapshots import queue
from trainer.text import listed

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SnapshotWriter:
    """Writes one run's snapshots. All methods but `due` are collective: every rank calls them, in the same order, and
    all raise when one fails."""

    def __init__(
        self,
        run_dir: Path,
        config: EvalSnapshotsConfig | None,
        writer: FolderWriter,
        mesh: Mesh,
        model: ModelRecord,
        *,
        in_background: bool,
    ) -> None:
        """
        Args:
            config: None: none are written; those that an earlier attempt left ahead are deleted all the same.
            writer: the checkpointer's.
            model: what every snapshot says about itself.
            in_background: write while training goes on.
        """
        self._run_dir = run_dir
        self._config = config
        self._writer = writer
        self._mesh = mesh
        self._model = model
        self._in_background = in_background

    def due(self, step: int, *, last: bool) -> bool:
        """Whether the weights after `step` steps are to be written.

        Args:
            last: the run has all its steps now.
        """
        return self._config is not None and (last or (step > 0 and step % self._config.interval == 0))

    def check_space(self, tensors: Mapping[str, Tensor], *, beside: int) -> None:
        """Check at start that one snapshot fits.

        Args:
            tensors: of the model.
            beside: bytes that are needed at the same time, by a checkpoint.

        Raises:
            RunError: it does not.
        """
        if self._config is not None:
            num_bytes = checkpoint_size(tensors, self._mesh.world_size) + beside
            what = "a snapshot and a checkpoint" if beside else "a snapshot"
            self._on_rank_0(lambda: require_space(self._run_dir / queue.FOLDER_NAME, num_bytes, what))

    def begin(self, step: int, *, more: bool) -> None:
        """The run goes on from `step`, at its start: before metrics.jsonl is cut back to it, as for `go_back`.

        Args:
            more: steps are to come.

        Raises:
            RunError: the folder of the snapshots cannot be changed.
        """

        def clean_up() -> None:
            queue.clear_leftovers(self._run_dir)
            self._cut_back(step)
            if self._config is not None:
                (self._run_dir / queue.FOLDER_NAME).mkdir(parents=True, exist_ok=True)
                if more:
                    queue.unmark_final(self._run_dir)

        self._on_rank_0(clean_up)

    def go_back(self, step: int) -> None:
        """Delete the snapshots of later steps: the run is back at `step`, and metrics.jsonl is about to be cut.

        Raises:
            RunError: one of them could not be written, or cannot be deleted.
        """
        self._writer.wait()
        self._on_rank_0(lambda: self._cut_back(step))

    def save(self, step: int, tensors: Mapping[str, Tensor], *, last: bool, wandb_id: str | None) -> None:
        """Write the weights after `step` steps. In the background this returns when the tensors are copied, at once if
        the checkpoint of the step has them; the caller may change them then.

        Args:
            tensors: of the model, named `model.<name>`; the same names on every rank.
            last: the run has all its steps.
            wandb_id: where results belong; rank 0's is written.

        Raises:
            RunError: writing before this one failed, or this one did, if not in the background.
        """
        num_bytes = checkpoint_size(tensors, self._mesh.world_size)
        staged = self._writer.stage(step, tensors)
        state = {"model": self._model.to_json(), "wandb_id": wandb_id}
        self._writer.do(
            lambda: self._write(step, staged, state, num_bytes=num_bytes, last=last), in_background=self._in_background
        )

    def make_up(
        self, step: int, tensors: Mapping[str, Tensor], *, last: bool, wandb_id: str | None, scored: bool
    ) -> None:
        """Write what is due of the step that the run was resumed from, if the run was killed before it could.

        Args:
            scored: the metrics of the step are recorded: the snapshot was there.

        Raises:
            RunError: as `save`.
        """
        if not self.due(step, last=last):
            return

        self._writer.wait()
        if not (scored or self._on_rank_0(lambda: queue.was_written(self._run_dir, step))):
            self.save(step, tensors, last=last, wandb_id=wandb_id)
        elif last:
            self._on_rank_0(lambda: queue.mark_final(self._run_dir, step))

    def _cut_back(self, step: int) -> None:
        steps = queue.cut_back(self._run_dir, step)
        if steps:
            logger.info("snapshots after step %d are of other weights now: deleted %s", step, _names(steps))

    def _write(
        self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], *, num_bytes: int, last: bool
    ) -> None:
        final = queue.snapshot_path(self._run_dir, step)
        try:
            self._writer.write(
                final, step=step, tensors=tensors, state=state, before_writing=lambda: self._make_room(num_bytes)
            )
            if last:
                self._on_rank_0(lambda: queue.mark_final(self._run_dir, step))
        except RunError as error:
            raise RunError(f"snapshot step_{step} could not be written to {final.parent}: {error}") from error

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

    def _on_rank_0(self, action: Callable[[], T]) -> T | None:
        """What `action` gives on rank 0, on every rank."""
        return agree(self._mesh, action if self._mesh.rank == 0 else lambda: None)[0]


def _names(steps: list[int]) -> str:
    return listed([f"step_{step}" for step in steps])
