"""Ranks fail together: what goes wrong on one is raised on all, instead of leaving the others in a collective."""

from collections.abc import Callable
from pickle import UnpicklingError
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from trainer.errors import PeerError, RunError
from trainer.parallel.mesh import Mesh
from trainer.text import first_line

T = TypeVar("T")

NAMED_ERRORS = (RunError, OSError, RuntimeError, CheckpointException)
"""What a full disk, a lost peer or a damaged file raises; anything else is a bug and keeps its type and traceback."""


def agree(mesh: Mesh, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank and wait for all of them. Collective on `mesh.host_group`.

    Returns:
        Its results, by rank.

    Raises:
        RunError: on every rank, when it failed on any; a PeerError where the failure is another's alone.
    """
    result: T | None = None
    failure: BaseException | None = None
    try:
        result = action()
    except (Exception, CheckpointException) as error:
        failure = error
    answer = (result, None if failure is None else describe(failure))
    answers = [answer]
    if mesh.host_group is not None:
        gathered: list[tuple[T | None, str | None]] = [answer] * mesh.world_size
        try:
            dist.all_gather_object(gathered, answer, group=mesh.host_group)
        except RuntimeError as error:
            raise PeerError(f"another rank ended or does not answer ({describe(error)})") from error
        answers = gathered
    if failure is not None and not isinstance(failure, NAMED_ERRORS):
        raise failure
    # Ranks that share a disk tell the same story; once is enough.
    texts = list(dict.fromkeys(text for _, text in answers if text is not None))
    if texts:
        raise (PeerError if failure is None else RunError)("; ".join(texts)) from failure
    return [result for result, _ in answers]  # type: ignore[misc]


def on_rank_0(mesh: Mesh, action: Callable[[], T]) -> T | None:
    """What `action` gives on rank 0, on every rank. Collective, and fails together, as `agree`."""
    return agree(mesh, action if mesh.rank == 0 else lambda: None)[0]


def describe(error: BaseException) -> str:
    """One line about an error, without the traceback that CheckpointException prints."""
    if isinstance(error, CheckpointException):
        return "; ".join(dict.fromkeys(describe(failure) for failure, _ in error.failures.values()))
    if isinstance(error, RunError):
        return str(error)
    if isinstance(error, UnpicklingError):
        # torch's own text advises to load with weights_only=False, which would run what the file says.
        return "a file of tensors is damaged, or holds something else than tensors"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return f"{type(error).__name__}: {first_line(error)}"
