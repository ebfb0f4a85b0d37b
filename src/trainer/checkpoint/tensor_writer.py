"""Writing of a checkpoint's tensors in torch.distributed.checkpoint's format."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer.checkpoint.manifest import FileRecord
from trainer.checkpoint.safe_reader import METADATA_NAME
from trainer.files import sync
from trainer.parallel.mesh import Mesh


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, FileRecord]:
    """Write this rank's part of the tensors to disk. Collective on `mesh.host_group`.

    Args:
        folder: exists, seen by all ranks.
        tensors: on the CPU; the same names on every rank.

    Returns:
        Size and checksum of each file this rank wrote: it knows, where another node's view may be stale.
    """
    save_tensors(
        dict(tensors),
        storage_writer=_Writer(folder),
        process_group=mesh.host_group,
        no_dist=mesh.host_group is None,
    )
    paths = list(folder.glob(f"__{mesh.rank}_*"))
    if mesh.rank == 0:
        paths.append(folder / METADATA_NAME)
    for path in paths:
        sync(path)
    return {path.name: FileRecord.of(path) for path in paths}


def checkpoint_size(tensors: Mapping[str, Tensor], world_size: int) -> int:
    """Bytes that a checkpoint of `tensors` (plain or DTensors, global sizes) takes on disk, rounded up.

    Each stored shard is a zip file of its own, 1 to 2 KiB more than its numbers.
    """
    content = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return content + 2048 * len(tensors) * world_size + 2**20


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
