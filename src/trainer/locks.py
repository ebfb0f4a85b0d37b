"""Locks on files: the system ends them with the processes that hold them, however those end."""

import errno
import fcntl
import os
from pathlib import Path
from typing import TextIO

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""What flock says on file systems without locks (Lustre mounted without them, for one)."""

_LOCKED = (errno.EWOULDBLOCK, errno.EACCES)
"""What flock says when somebody else has the lock; the second over some versions of NFS."""


def try_lock(file: TextIO | int, *, shared: bool = False) -> bool | None:
    """Lock an open file, without waiting.

    Args:
        file: it, or its descriptor.
        shared: others may have it too, if they share it.

    Returns:
        whether it is ours now; None where the file system has no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCKED:
            return False
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def unlock(file: TextIO | int) -> None:
    """Give up the lock on a file that stays open."""
    fcntl.flock(file, fcntl.LOCK_UN)


def is_at(handle: int, path: Path) -> bool:
    """The open file is the one at `path`: somebody may have deleted it meanwhile, and a deleted one locks nothing."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
