"""Saving and loading on all ranks; see docs/checkpoints.md for the commit protocol."""

import json
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from configs.checkpoint import CheckpointConfig
from trainer.checkpoint.agreement import agree
from trainer.checkpoint.folder import (
    FOLDER_NAME,
    commit,
    make_empty,
    prepare,
    prune,
    read_manifest,
    require_space,
    step_path,
    sync,
)
from trainer.checkpoint.safe_reader import METADATA_NAME, DamagedError, SafeReader, read_metadata
from trainer.checkpoint.staging import Stager
from trainer.errors import RunError
from trainer.parallel.mesh import Mesh

T = TypeVar("T")


class Checkpointer:
    """Saves and loads one run's checkpoints. `save`, `wait`, `load`, `check_space` are collective: every rank calls
    them, in the same order, and all raise when one fails."""

    def __init__(self, run_dir: Path, config: CheckpointConfig | None, mesh: Mesh) -> None:
        """
        Args:
            run_dir: checkpoints lie in its subfolder `checkpoints`, on storage that all ranks share.
            config: None: nothing is saved; `load` works.
            mesh: collectives use its `host_group` only, so that the writer's thread meets none of the step's.
        """
        self._folder = run_dir / FOLDER_NAME
        self._config = config
        self._mesh = mesh
        self._stager = Stager(mesh.device)
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        self._committed: set[int] = set()
        """Steps written by this object, since the step it last loaded."""
        # One process is how a small run works, not something to warn about.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        if config is not None:
            self._agree(self._on_rank_0(lambda: prepare(self._folder)))

    def due(self, step: int) -> bool:
        """Whether the weights after `step` steps are to be saved. The last step's are, whatever this says."""
        interval = None if self._config is None else self._config.interval
        return interval is not None and step > 0 and step % interval == 0

    def check_space(self, num_bytes: int) -> None:
        """Check at start that one checkpoint of `num_bytes` fits (`checkpoint_size`).

        Raises:
            RunError: it does not.
        """
        self._agree(lambda: require_space(self._folder, num_bytes))

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
        size = checkpoint_size(tensors, self._mesh.world_size)
        if self._agree(lambda: self._is_saved_or_fits(step, size))[0]:
            return
        staged = self._stager.stage(tensors)
        frozen_state = json.loads(json.dumps(state))
        if config.async_save:
            # A daemon: it must not outlive a run that dies.
            self._writer = threading.Thread(
                target=self._write_and_keep_error, args=(step, staged, frozen_state), name="checkpoint", daemon=True
            )
            self._writer.start()
        else:
            self._write(step, staged, frozen_state)

    def wait(self) -> None:
        """Return when the last save is committed.

        Raises:
            RunError: it failed, on any rank. Earlier checkpoints are as they were.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def load(self, path: Path, tensors: Mapping[str, Tensor], *, ignore: tuple[str, ...] = ()) -> None:
        """Fill `tensors` in place from the checkpoint at `path`, written by any number of ranks.

        Args:
            path: from `find_checkpoint`.
            tensors: the same names on every rank; plain tensors or DTensors, on any device.
            ignore: names with these beginnings may be in the checkpoint only ("optimizer.", say).

        Raises:
            RunError: it is damaged or not safe, or names, shapes or dtypes differ. Nothing is loaded then, unless
                reading itself broke off.
        """
        self.wait()
        checked: list[Metadata] = []
        self._agree(lambda: checked.append(check_fits(path, tensors, ignore)))

        def read() -> None:
            load_tensors(
                dict(tensors),
                storage_reader=SafeReader(path, checked[0]),
                process_group=self._mesh.host_group,
                no_dist=self._mesh.host_group is None,
            )

        try:
            self._agree(read)
        except RunError as error:
            raise RunError(f"checkpoint {path} cannot be loaded: {error}") from error
        # A run that goes back and comes by these steps again has other weights there.
        step = int(read_manifest(path)["step"])
        self._committed = {saved for saved in self._committed if saved <= step}

    def close(self) -> None:
        """Free the staging memory. `wait` comes first: only it tells whether the last save succeeded."""
        if self._writer is None:
            self._stager.close()

    def _saving_config(self) -> CheckpointConfig:
        if self._config is None:
            raise ValueError("save without [ckpt]")
        return self._config

    def _is_saved_or_fits(self, step: int, num_bytes: int) -> bool:
        if step in self._committed and step_path(self._folder, step).exists():
            return True
        require_space(self._folder, num_bytes)
        return False

    def _write_and_keep_error(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        try:
            self._write(step, tensors, state)
        except BaseException as error:  # raised by the next `wait`, in the thread that can end the run
            self._error = error

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        config = self._saving_config()
        final = step_path(self._folder, step)
        temporary = self._folder / f".step_{step}.tmp"
        try:
            # Agreed before anyone writes: another rank must not write into a folder that rank 0 still clears.
            self._agree(self._on_rank_0(lambda: make_empty(temporary)))
            files = _merge(self._agree(lambda: self._write_tensors(temporary, tensors)))
            self._agree(
                self._on_rank_0(lambda: commit(temporary, final, step=step, state=state, files=files)),
            )
        except RunError as error:
            if self._mesh.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # a full disk should not stay full of it
            raise RunError(
                f"checkpoint step_{step} could not be written to {self._folder}: {error}; "
                "earlier checkpoints are as they were"
            ) from error
        self._committed.add(step)
        if self._mesh.rank == 0:
            prune(self._folder, step, keep_last=config.keep_last, keep_interval=config.keep_interval)

    def _write_tensors(self, temporary: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
        """Write this rank's part of the tensors to disk.

        Returns:
            Size in bytes of each file this rank wrote: it knows, where another node's view may be stale.
        """
        save_tensors(
            dict(tensors),
            storage_writer=_Writer(temporary),
            process_group=self._mesh.host_group,
            no_dist=self._mesh.host_group is None,
        )
        paths = list(temporary.glob(f"__{self._mesh.rank}_*"))
        if self._mesh.rank == 0:
            paths.append(temporary / METADATA_NAME)
        for path in paths:
            sync(path)
        return {path.name: path.stat().st_size for path in paths}

    def _on_rank_0(self, action: Callable[[], None]) -> Callable[[], None]:
        return action if self._mesh.rank == 0 else lambda: None

    def _agree(self, action: Callable[[], T]) -> list[T]:
        return agree(self._mesh, action)


class _Writer(FileSystemWriter):
    def __init__(self, path: Path) -> None:
        # The library's own sync does not flush first before torch 2.15, so files are synced after they are closed.
        # Nothing to copy ahead: the tensors are on the CPU, and the CUDA stream belongs to the training thread.
        super().__init__(path, sync_files=False, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch's zip writer fails once more when it closes a file on a full disk, and hides the reason.
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, OSError):
                    raise cause from None
                cause = cause.__cause__ or cause.__context__
            raise


def checkpoint_size(tensors: Mapping[str, Tensor], world_size: int) -> int:
    """Bytes that a checkpoint of `tensors` (plain or DTensors, global sizes) takes on disk, rounded up.

    Each stored shard is a zip file of its own, 1 to 2 KiB more than its numbers.
    """
    content = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return content + 2048 * len(tensors) * world_size + 2**20


def _merge(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    return {name: size for part in parts for name, size in part.items()}


def check_fits(path: Path, tensors: Mapping[str, Tensor], ignore: tuple[str, ...] = ()) -> Metadata:
    """See whether a checkpoint could be loaded, without reading tensors.

    Args:
        path: from `find_checkpoint`.
        tensors: as in `Checkpointer.load`; they may lie on the meta device.
        ignore: names with these beginnings may be in the checkpoint only.

    Returns:
        Where each of its tensors lies.

    Raises:
        RunError: it is damaged or not safe, or names, shapes or dtypes differ.
    """
    try:
        read_manifest(path)
        metadata = read_metadata(path)
    except DamagedError as error:
        raise RunError(f"checkpoint {path} cannot be loaded: {error}") from error
    stored = metadata.state_dict_metadata
    differences = [
        *_list("missing in the checkpoint", [name for name in tensors if name not in stored]),
        *_list(
            "in the checkpoint only", [name for name in stored if name not in tensors and not name.startswith(ignore)]
        ),
        *_list("different", [text for name in tensors if (text := _difference(name, tensors[name], stored))]),
    ]
    if differences:
        raise RunError(f"checkpoint {path} does not fit this run: {'; '.join(differences)}")
    return metadata


def _difference(name: str, tensor: Tensor, stored: Mapping[str, Any]) -> str | None:
    entry = stored.get(name)
    if not isinstance(entry, TensorStorageMetadata):
        return None  # missing: listed as that
    saved, wanted = (tuple(entry.size), entry.properties.dtype), (tuple(tensor.shape), tensor.dtype)
    if saved == wanted:
        return None
    return f"{name} is {saved[0]} {_dtype(saved[1])}, this run has {wanted[0]} {_dtype(wanted[1])}"


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _list(kind: str, names: list[str], most: int = 5) -> list[str]:
    if not names:
        return []
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return [f"{kind}: {', '.join(names[:most] + more)}"]
