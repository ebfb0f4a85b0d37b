"""Saving and loading on all ranks; see docs/checkpoints.md for the commit protocol."""

import json
import logging
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from configs.checkpoint import CheckpointConfig
from configs.errors import ConfigError
from trainer.checkpoint.agreement import agree, on_rank_0
from trainer.checkpoint.export import DTYPES, MODEL_PREFIX
from trainer.checkpoint.fits import check_fits
from trainer.checkpoint.folder import FOLDER_NAME, find_checkpoint, find_newest, prepare, prune, step_path
from trainer.checkpoint.folder_writer import FolderWriter
from trainer.checkpoint.manifest import file_records, read_manifest, wrong_content
from trainer.checkpoint.model_record import ModelRecord
from trainer.checkpoint.resume import Place
from trainer.checkpoint.safe_reader import DamagedError, SafeReader
from trainer.checkpoint.tensor_writer import checkpoint_size
from trainer.checkpoint.weights_folder import WeightsFolder, discard_weights, weights_size
from trainer.errors import RunError
from trainer.files import require_space
from trainer.parallel.mesh import Mesh

logger = logging.getLogger(__name__)

_WORD_SECONDS = 5.0
"""Between two words of rank 0 in the middle of an export."""

T = TypeVar("T")


class Checkpointer:
    """Saves and loads one run's checkpoints. All methods but `due` and `close` are collective: every rank calls them,
    in the same order, and all raise when one fails."""

    def __init__(
        self, run_dir: Path, config: CheckpointConfig | None, mesh: Mesh, model: ModelRecord | None = None
    ) -> None:
        """
        Args:
            run_dir: checkpoints lie in its subfolder `checkpoints`, on storage that all ranks share.
            config: None: nothing is saved; `find` and `load` work.
            mesh: collectives use its `host_group` only, so that the writer's thread meets none of the step's.
            model: stored with every checkpoint as `model` of its state; `ckpt.weights` needs it.
        """
        self._run_dir = run_dir
        self._folder = run_dir / FOLDER_NAME
        self._config = config
        self._mesh = mesh
        self._model = model
        self.writer = FolderWriter(mesh)
        """The run's only one: what else writes tensors in the background does it with this."""

        self._committed: set[int] = set()
        """Steps written by this object, since the step it last loaded."""
        self._first_loaded: int | None = None
        """Up to here the folder's checkpoints are what the run came from; later ones are its own if it wrote them."""
        self._found: Path | None = None
        """The checkpoint whose content `find` has just checked."""
        self._weights: WeightsFolder | None = None
        """On rank 0, with `ckpt.weights`."""
        # One process is how a small run works, not something to warn about.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        if config is not None:
            on_rank_0(mesh, self._prepare)

    def due(self, step: int) -> bool:
        """Whether the weights after `step` steps are to be saved. The last step's are, whatever this says."""
        interval = None if self._config is None else self._config.interval
        return interval is not None and step > 0 and step % interval == 0

    def size(self, tensors: Mapping[str, Tensor]) -> int:
        """Bytes that a checkpoint of `tensors` takes on disk, with its weights if `ckpt.weights` asks for them."""
        size = checkpoint_size(tensors, self._mesh.world_size)
        if self._config is not None and self._config.weights and self._model is not None:
            count = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith(MODEL_PREFIX))
            size += weights_size(count, DTYPES[self._model.export_dtype].itemsize)
        return size

    def check_space(self, tensors: Mapping[str, Tensor]) -> None:
        """Check at start that one checkpoint of `tensors` fits, with its weights if `ckpt.weights` asks for them.

        Raises:
            RunError: it does not.
        """
        num_bytes = self.size(tensors)
        self._agree(lambda: require_space(self._folder, num_bytes, "a checkpoint"))

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Save the weights after `step` steps. With `async_save` this returns when the tensors are copied; the
        caller may change them at once. A step that this run already saved is left as it is.

        Args:
            step: names the checkpoint.
            tensors: the same names on every rank; plain tensors (equal on all ranks) or DTensors.
            state: everything else, JSON-able; rank 0's is saved.

        Raises:
            RunError: the last save failed, there is no space for this one or, without `async_save`, it failed.
        """
        config = self._saving_config()
        self.wait()
        size = self.size(tensors)
        if self._agree(lambda: self._is_saved_or_fits(step, size))[0]:
            return
        staged = self.writer.stage(step, tensors)
        model = {} if self._model is None else {"model": self._model.to_json()}
        frozen_state = json.loads(json.dumps({**state, **model}))
        self.writer.do(lambda: self._write(step, staged, frozen_state), in_background=config.async_save)

    def make_up_weights(self, path: Path) -> None:
        """With `ckpt.weights`: write the weights of a checkpoint of this run whose run was killed before it could.

        In the background: until `wait`, no other thread may use `mesh.host_group`.
        """
        self.wait()
        config = self._config
        if config is None or not config.weights or path.resolve().parent != self._folder.resolve():
            return
        step = int(read_manifest(path)["step"])
        weights = self._weights
        if not any(self._agree(lambda: weights is not None and not weights.has(step))):
            return
        self.writer.do(lambda: self._write_weights(step), in_background=config.async_save)

    def wait(self) -> None:
        """Return when the last save is committed, and all else that `writer` does.

        Raises:
            RunError: some of it failed, on any rank. Earlier checkpoints are as they were.
        """
        self.writer.wait()

    def find(self, run_dir: Path, *, step: int | None = None, at_most: int | None = None) -> Path:
        """`find_checkpoint`, and the content of what it finds: each rank reads a share of the files.

        Rank 0 alone looks: another node may not see the newest folder of shared storage yet.

        Args:
            run_dir: the run that wrote it.
            step: its step; None: the newest whole one.
            at_most: of this run as it goes on now, up to this step: not what an earlier attempt left ahead of the
                step that this one was resumed from.

        Raises:
            RunError: there is none, or the one asked for is missing or damaged.
        """
        path = self._find(run_dir, step, at_most, required=True)
        assert path is not None, "a required one"
        return path

    def find_place(self, place: Place) -> Path | None:
        """As `find`, at a place where there may be none: None then."""
        return self._find(place.run_dir, place.step, None, required=place.required)

    def _find(self, run_dir: Path, step: int | None, at_most: int | None, *, required: bool) -> Path | None:
        self.wait()
        while True:
            bound = at_most
            path = self._agree(lambda: self._look(run_dir, step, bound, required=required))[0]  # noqa: B023
            if path is None:
                return None
            found = int(path.name.removeprefix("step_"))
            if at_most is not None and not self._is_own(found):
                at_most = found - 1
                continue
            reason = self._wrong_content(path)
            if reason is None:
                self._found = path
                return path
            if step is not None:
                raise RunError(f"checkpoint {path} is damaged: {reason}")
            if self._mesh.rank == 0:
                logger.warning("checkpoint %s is damaged and passed over: %s", path, reason)
            at_most = found - 1

    def load(self, path: Path, tensors: Mapping[str, Tensor], *, ignore: tuple[str, ...] = ()) -> int:
        """Fill `tensors` in place from the checkpoint at `path`, written by any number of ranks.

        Args:
            path: from `find`, or `find_checkpoint`.
            tensors: the same names on every rank; plain tensors or DTensors, on any device.
            ignore: names with these beginnings may be in the checkpoint only ("optimizer.", say).

        Returns:
            its step.

        Raises:
            RunError: it is damaged or not safe, or names, shapes or dtypes differ. Nothing is loaded then, unless
                reading itself broke off.
        """
        self.wait()
        self.writer.forget()
        checked: list[tuple[int, Metadata]] = []
        self._agree(lambda: checked.append(check_fits(path, tensors, ignore)))
        step, metadata = checked[0]
        found, self._found = self._found, None
        reason = None if found == path else self._wrong_content(path)
        if reason is not None:
            raise RunError(f"checkpoint {path} cannot be loaded: {reason}")

        def read() -> None:
            load_tensors(
                dict(tensors),
                storage_reader=SafeReader(path, metadata),
                process_group=self._mesh.host_group,
                no_dist=self._mesh.host_group is None,
            )

        try:
            self._agree(read)
        except RunError as error:
            raise RunError(f"checkpoint {path} cannot be loaded: {error}") from error
        # A run that goes back and comes by these steps again has other weights there.
        self._committed = {saved for saved in self._committed if saved <= step}
        self._first_loaded = step if self._first_loaded is None else min(self._first_loaded, step)
        return step

    def close(self) -> None:
        """Free the staging memory. `wait` comes first: only it tells whether the last save succeeded."""
        self.writer.close()

    def _is_own(self, step: int) -> bool:
        return self._first_loaded is None or step <= self._first_loaded or step in self._committed

    def _saving_config(self) -> CheckpointConfig:
        if self._config is None:
            raise ValueError("save without [ckpt]")
        return self._config

    def _is_saved_or_fits(self, step: int, num_bytes: int) -> bool:
        if step in self._committed and step_path(self._folder, step).exists():
            return True
        require_space(self._folder, num_bytes, "a checkpoint")
        return False

    def _prepare(self) -> None:
        prepare(self._folder)
        if self._saving_config().weights:
            if self._model is None:
                raise ValueError("ckpt.weights without a ModelRecord")
            self._weights = WeightsFolder(self._run_dir, self._model)

    def _look(self, run_dir: Path, step: int | None, at_most: int | None, *, required: bool) -> Path | None:
        if self._mesh.rank != 0:
            return None
        repair = run_dir == self._run_dir  # another run may be alive
        if not required:
            return find_newest(run_dir, logger.warning, at_most=at_most, repair=repair)
        try:
            return find_checkpoint(run_dir, step, logger.warning, at_most=at_most, repair=repair)
        except ConfigError as error:
            raise RunError(error.faults[0].message) from error

    def _wrong_content(self, path: Path) -> str | None:
        """What is wrong with the content of any file, on every rank; each reads its share."""

        def read_share() -> str | None:
            try:
                files = sorted(file_records(read_manifest(path)).items())
            except DamagedError as error:
                # Rank 0 found nothing: this rank sees another folder.
                return f"{error}, as rank {self._mesh.rank} sees it"
            return wrong_content(path, dict(files[self._mesh.rank :: self._mesh.world_size]))

        return next((reason for reason in self._agree(read_share) if reason is not None), None)

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        config = self._saving_config()
        try:
            self.writer.write(
                step_path(self._folder, step),
                step=step,
                tensors=tensors,
                state=state,
                # Those of an earlier attempt are of other weights than the checkpoint about to take the step's name.
                before_commit=lambda: discard_weights(self._run_dir, step),
            )
        except RunError as error:
            raise RunError(
                f"checkpoint step_{step} could not be written to {self._folder}: {error}; "
                "earlier checkpoints are as they were"
            ) from error
        self._committed.add(step)
        if config.weights:
            self._write_weights(step)
        if self._mesh.rank == 0:
            prune(
                self._folder,
                step,
                keep_last=config.keep_last,
                keep_interval=config.keep_interval,
                on_removal=partial(discard_weights, self._run_dir),
            )

    def _write_weights(self, step: int) -> None:
        """Export the committed checkpoint of `step`, on rank 0; the others wait, so that all fail together."""
        try:
            while not self._agree(lambda: self._export(step_path(self._folder, step)))[0]:
                pass
        except RunError as error:
            raise RunError(f"ckpt.weights of step {step}: {error}; its checkpoint is written") from error

    def _export(self, path: Path) -> bool:
        """Write the weights of the checkpoint at `path` on rank 0, and say there that they are written. Meanwhile it
        tells the others that they are not yet: a collective that one rank is late for is given up, and a large model
        may take longer than that."""
        if self._weights is None:
            return False
        last_word = time.monotonic()

        def tell(num_bytes: int) -> None:
            nonlocal last_word
            if time.monotonic() >= last_word + _WORD_SECONDS:
                self._agree(lambda: False)
                last_word = time.monotonic()

        self._weights.write(path, tell)
        return True

    def _agree(self, action: Callable[[], T]) -> list[T]:
        return agree(self._mesh, action)
