"""Files and folders that are there whole or not at all."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from trainer.errors import RunError
from trainer.text import show_bytes


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, its folder too if there is none. Killed at any moment, a reader sees all of it or what was there.

    Raises:
        OSError: it cannot be written; what was there is as it was.
    """
    unfinished = path.with_name(f"{path.name}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        unfinished.write_bytes(content)
        sync(unfinished)
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_empty(folder: Path) -> None:
    """A new folder, whatever was there."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()


def hide(folder: Path, suffix: str) -> Path:
    """Rename a folder to `.name.suffix`: it is not whole, or not wanted any more. Gives its new place."""
    hidden = folder.with_name(f".{folder.name}.{suffix}")
    if hidden.exists():
        shutil.rmtree(hidden)
    return folder.rename(hidden)


def remove_folder(folder: Path) -> None:
    """Delete a folder. Killed at any moment, none that looks whole is left damaged."""
    shutil.rmtree(hide(folder, "gone"))


def rename_over(new: Path, folder: Path) -> Path | None:
    """Give the folder `new` the name of `folder`, which may hold files: no rename replaces such a one.

    Killed between the two renames, what was there is left as `.name.old`.

    Returns:
        what was there, hidden as `.name.gone`; None if there was nothing.
    """
    replaced = None
    if folder.exists():
        replaced = hide(folder, "old")
        new.rename(folder)
        gone = replaced.with_suffix(".gone")
        if gone.exists():
            shutil.rmtree(gone)
        replaced = replaced.rename(gone)
    else:
        new.rename(folder)
    sync(folder.parent)
    return replaced


def require_space(folder: Path, num_bytes: int, what: str) -> None:
    """Check that something fits.

    Args:
        folder: where it will lie; need not exist yet.
        what: it is, for the message.

    Raises:
        RunError: it does not.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise RunError(
            f"not enough disk space for {what} in {folder}: it needs {show_bytes(num_bytes)}, free are "
            f"{show_bytes(free)}"
        )
