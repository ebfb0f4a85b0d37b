"""A folder in which processes work, attempt after attempt: whose it is now, and how an attempt is laid out.

A training has its run directory, an `eval-worker` a folder within it; see docs/launch.md.
"""

import errno
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pydantic import BaseModel

from configs.errors import ConfigError
from configs.launch import RUN_CONFIG
from configs.sft import SFTConfig
from trainer.errors import RunError
from trainer.files import write_whole
from trainer.locks import try_lock
from trainer.run import attempt_config, attempt_logs

LOCK_NAME = ".lock"

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Faults of the place that the config names, not of the moment."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """What a folder is for."""

    what: str
    """Who works there, for messages: "a run"."""

    folder: str
    """What it is called in messages."""

    name_key: str
    """Config key that picks the folder."""

    place_key: str
    """Config key of the place that it lies in."""

    way_out: str = ""
    """What else can be done while it is in use, for messages."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A folder made ready for its workers. Close it when they are gone."""

    dir: Path
    number: int
    lock: TextIO

    def close(self) -> None:
        """Let others use the folder."""
        self.lock.close()


def unusable(folder: Path, use: Use, error: OSError) -> ConfigError | RunError:
    """What to make of the failure of something done to the folder."""
    message = f"{error.filename or folder}: {error.strerror or error}"
    if error.errno in _FORBIDDEN:
        return ConfigError.one(use.place_key, message)
    return RunError(f"{use.folder} {folder} cannot be used: {message}")


@contextmanager
def taken(folder: Path, use: Use, say: Callable[[str], None]) -> Iterator[TextIO]:
    """Make the folder and take it for this launcher and, later, its workers; give it up if the body fails.

    The launcher ends up with a shared lock, as each worker does (see `share`), and a newcomer asks for an exclusive
    one: so the folder is in use as long as any process of the attempt lives.

    Args:
        say: told that the file system has no locks.

    Raises:
        ConfigError: it is in use, or cannot be written.
        RunError: it cannot be used for another reason, such as a full disk.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _take(folder, use, say)
        try:
            yield lock
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise unusable(folder, use, error) from error


def _take(folder: Path, use: Use, say: Callable[[str], None]) -> TextIO:
    # Emptied below: a link put there by another user must not lead to a file of ours.
    lock = os.fdopen(os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666), "a+")
    try:
        is_ours = try_lock(lock)
        if is_ours is False:
            raise _in_use(folder, use)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        if is_ours is None:
            say(f"{folder} lies on a file system without locks: nothing keeps a second start from using it too")
        elif try_lock(lock, shared=True) is False:  # the change is not atomic
            raise _in_use(folder, use)
    except BaseException:
        with suppress(OSError):  # the disk may be full, and closing tries to write once more
            lock.close()
        raise
    return lock


def share(folder: Path) -> TextIO:
    """A worker's hold on the folder: it counts as in use until the returned file is closed.

    Raises:
        RunError: others have taken it, so this worker's launcher must be dead.
    """
    lock = (folder / LOCK_NAME).open("r+")
    if try_lock(lock, shared=True) is False:
        lock.close()
        raise RunError(f"{folder} was taken by another run")
    return lock


def is_in_use(folder: Path) -> bool | None:
    """Whether a process of an attempt lives; None where nobody can tell: no locks, or no right to read theirs."""
    try:
        # For reading only: somebody else's run may be looked at without the right to write.
        lock = (folder / LOCK_NAME).open()
    except OSError as error:
        return False if error.errno == errno.ENOENT else None
    with lock:
        try:
            is_free = try_lock(lock)
        except OSError:
            return None
    return None if is_free is None else not is_free


def refuse_living(folder: Path, use: Use) -> None:
    """
    Raises:
        ConfigError: the folder is in use, or cannot be looked at.
        RunError: as `taken`.
    """
    path = folder / LOCK_NAME
    try:
        if not path.exists():
            return
        with path.open("r+") as lock:
            if try_lock(lock) is False:
                raise _in_use(folder, use)
    except OSError as error:
        raise unusable(folder, use, error) from error


def _in_use(folder: Path, use: Use) -> ConfigError:
    holder = (folder / LOCK_NAME).read_text(errors="replace").strip() or "another process"
    message = f"{folder} is in use by {use.what} that has not ended ({holder})"
    host = holder.rpartition(" on ")[2] if " on " in holder else socket.gethostname()
    if host != socket.gethostname():
        # The kernel frees the lock of a dead process; a file server may keep that of a dead machine.
        message += f"; if {host} is down for good, delete {folder / LOCK_NAME}"
    return ConfigError.one(use.name_key, message + use.way_out)


def lay_out(folder: Path, config: SFTConfig, lock: TextIO, *, is_beside: bool = False) -> Attempt:
    """A new attempt in a folder that was taken: its logs, and its config.

    Args:
        is_beside: it does not go on with the work of those before, whose config stays the folder's.

    Raises:
        OSError: it cannot be written.
    """
    number = _next_attempt(folder)
    attempt_logs(folder, number).mkdir(parents=True)
    _replace_link(folder / "logs" / "latest", attempt_logs(folder, number).name)
    write_config(config, attempt_config(folder, number))
    if not is_beside:
        write_config(config, folder / RUN_CONFIG)
    return Attempt(dir=folder, number=number, lock=lock)


def write_config(config: BaseModel, path: Path) -> None:
    """Write a config as JSON, which keeps nulls and parses to the same object. A reader never sees half of it."""
    write_whole(path, (config.model_dump_json(indent=2) + "\n").encode())


def _next_attempt(folder: Path) -> int:
    names = [entry.name for part in ("configs", "logs") for entry in (folder / part).glob("attempt_*")]
    return max((int(match[1]) + 1 for name in names if (match := re.fullmatch(r"attempt_(\d+)", name))), default=0)


def _replace_link(link: Path, target: str) -> None:
    new = link.with_name(f"{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)
