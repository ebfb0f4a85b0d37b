"""Folders of tensors, written in the background from copies and committed by one rename: checkpoints and snapshots."""

import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint.agreement import agree, on_rank_0
from trainer.checkpoint.folder import commit
from trainer.checkpoint.manifest import FileRecord
from trainer.checkpoint.staging import Stager
from trainer.checkpoint.tensor_writer import write_tensors
from trainer.errors import RunError
from trainer.files import make_empty
from trainer.parallel.mesh import Mesh


class FolderWriter:
    """Copies tensors aside and does pieces of work with them in a thread, one after the other.

    A run has one: two threads would mix their collectives on `mesh.host_group`, and two sets of copies would take the
    host's memory twice. Every rank calls everything in the same order.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._stager = Stager(mesh.device)
        self._staged: dict[str, Tensor] = {}
        self._staged_step: int | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def stage(self, step: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of `tensors` as they are after `step` steps, on the CPU and valid until another step is staged.

        Tensors that this step has staged already are neither copied again nor waited for. Otherwise this returns once
        the work under way is done and the device has copied: a deliberate host sync.

        Raises:
            RunError: the work under way failed, on any rank.
        """
        if step != self._staged_step or not tensors.keys() <= self._staged.keys():
            self.wait()
            self._staged, self._staged_step = self._stager.stage(tensors), step
        return {name: self._staged[name] for name in tensors}

    def forget(self) -> None:
        """What is staged is no longer what the run has: it went back, and may come by the same step again."""
        self._staged, self._staged_step = {}, None

    def do(self, work: Callable[[], None], *, in_background: bool) -> None:
        """Do `work` now; or, in the background, after all work before it, and not at all if any of that fails."""
        if not in_background:
            self.wait()
            work()
            return
        before = self._thread

        def follow() -> None:
            if before is not None:
                before.join()
            if self._error is not None:
                return
            try:
                work()
            except BaseException as error:  # raised by the next `wait`, in the thread that can end the run
                self._error = error

        # A daemon: it must not outlive a run that dies.
        self._thread = threading.Thread(target=follow, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when all work is done.

        Raises:
            RunError: some of it failed, on any rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Free the copies. `wait` comes first: only it tells whether the work succeeded."""
        if self._thread is None:
            self.forget()
            self._stager.close()

    def write(
        self,
        final: Path,
        *,
        step: int,
        tensors: Mapping[str, Tensor],
        state: dict[str, Any],
        before_writing: Callable[[], None] = lambda: None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a folder of staged tensors and give it its name. Collective; a piece of work for `do`.

        Args:
            final: seen by all ranks; its parent exists.
            tensors: from `stage`.
            state: JSON-able, what `read_state` gives back; rank 0's is written.
            before_writing: done on rank 0 first, to make room or see that there is some.
            before_commit: done on rank 0 when all tensors are on disk.

        Raises:
            RunError: it could not be written. Nothing of it is left then.
        """
        temporary = final.with_name(f".{final.name}.tmp")

        def begin() -> None:
            before_writing()
            make_empty(temporary)

        def end(files: Mapping[str, FileRecord]) -> None:
            before_commit()
            commit(temporary, final, step=step, state=state, files=files)

        try:
            # Agreed before anyone writes: another rank must not write into a folder that rank 0 still clears.
            on_rank_0(self._mesh, begin)
            files = _merge(agree(self._mesh, lambda: write_tensors(temporary, tensors, self._mesh)))
            on_rank_0(self._mesh, lambda: end(files))
        except RunError:
            if self._mesh.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # a full disk should not stay full of it
            raise


def _merge(parts: Iterable[dict[str, FileRecord]]) -> dict[str, FileRecord]:
    return {name: record for part in parts for name, record in part.items()}
