"""The folder of a cache of tokenised data: there whole or not at all, whoever makes it and however that ends.

It is made in a hidden folder beside it and renamed. That alone keeps readers from half a cache and builders from each
other's files; a lock saves them from doing the same work twice, and tells whether the hidden folders of others are
leftovers.
"""

import errno
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from configs.errors import ConfigError
from trainer.errors import RunError
from trainer.files import sync
from trainer.locks import is_at, try_lock
from trainer.text import first_line

log = logging.getLogger(__name__)

Cache = TypeVar("Cache")

_WAIT_SECONDS = 0.1

_NAME_CHARS = 60

_STRANGER_SECONDS = 24 * 3600.0
"""The hidden folder of another machine or cache is a leftover when nothing was written there for so long: a lock need
not reach other machines (Lustre's localflock)."""

_NO_FAULT_OF_THE_CONFIG = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def cache_name(source: str, content: dict[str, Any]) -> str:
    """The name of a cache: its source's, and a digest of all that changes what it holds and nothing else.

    Args:
        source: file or folder that it is made of.
        content: JSON-able.
    """
    digest = blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", source)[-_NAME_CHARS:].strip("._") or "data"
    return f"{name}-{digest}"


class CacheFolder:
    """The place of a cache."""

    def __init__(self, cache_dir: Path, name: str, *, key: str) -> None:
        """
        Args:
            key: of the config, where faults are reported.
        """
        self._key = key
        self._parent = cache_dir.absolute()
        self._host = "".join(letter if letter.isalnum() else "_" for letter in socket.gethostname())
        self.path = self._parent / name

    def open_or_make(self, what: str, open_: Callable[[Path], Cache], make: Callable[[Path], None]) -> Cache:
        """The cache as it is there, else it is made first.

        Many processes may call it at the same time, on many machines that share the folder; one of them does the work.

        Args:
            what: is tokenised, for messages.
            open_: opens the folder of the cache. Raises OSError or ValueError where it is not whole.
            make: writes the files into a new folder.

        Raises:
            ConfigError, RunError: the folder of caches cannot be written; and what `make` raises.
        """

        def find(*, say: bool = False) -> Cache | None:
            if not self.path.exists():
                return None
            try:
                return open_(self.path)
            except (OSError, ValueError) as error:
                if say:
                    reason = first_line(error)
                    log.warning("the tokenised data in %s is damaged and is made anew: %s", self.path, reason)
                return None

        def is_made() -> bool:
            return find() is not None

        found = find(say=True)
        if found is not None:
            return found
        # No fault, but info is not shown before a run has its logs.
        with self.lock(
            is_made=is_made, on_wait=lambda: log.warning("another process tokenises %s; waiting for it", what)
        ):
            found = find()
            if found is None:
                with self.making() as new:
                    make(new)
                    self.publish(new, is_whole=is_made)
                found = open_(self.path)
        return found

    @contextmanager
    def lock(self, *, is_made: Callable[[], bool], on_wait: Callable[[], None]) -> Iterator[None]:
        """Wait until nobody else on this machine makes this cache. Where the file system has no locks, don't.

        Args:
            is_made: whether the cache is there meanwhile: there is nothing more to wait for.
            on_wait: called once if somebody else is at it.

        Raises:
            ConfigError, RunError: the folder of caches cannot be written.
        """
        path = self._hidden("lock")
        with self.named_faults():
            handle, is_ours = self._try_lock(path)
            if is_ours is False:
                on_wait()
            while is_ours is False and not is_made():
                os.close(handle)
                time.sleep(_WAIT_SECONDS)
                handle, is_ours = self._try_lock(path)
        try:
            if is_ours and not is_made():
                self._remove_leftovers()
            yield
        finally:
            if is_ours is not False:
                with suppress(OSError):
                    path.unlink()
            os.close(handle)

    def _try_lock(self, path: Path) -> tuple[int, bool | None]:
        self._parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        is_ours = try_lock(handle)
        # Whoever is done deletes the lock, and a deleted one locks nothing.
        return handle, is_ours and is_at(handle, path)

    @contextmanager
    def making(self) -> Iterator[Path]:
        """A new hidden folder to make the cache in; gone at the end unless `publish` gave it its name.

        Raises:
            ConfigError, RunError: it cannot be made.
        """
        folder = self._hidden(f"{self._host}.{uuid4().hex}")
        with self.named_faults():
            folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, folder: Path, is_whole: Callable[[], bool]) -> None:
        """Give a folder that is finished the name of the cache, and let a damaged one that has it make way.

        Args:
            is_whole: whether the cache that is there is. Somebody else may have been faster.

        Raises:
            ConfigError, RunError: a file cannot be written.
        """
        with self.named_faults():
            for file in folder.iterdir():
                sync(file)
            sync(folder)
            if self.path.exists() and not is_whole():
                damaged = self._hidden(f"{self._host}.{uuid4().hex}")
                with suppress(FileNotFoundError):  # somebody else was at the same
                    self.path.rename(damaged)
                shutil.rmtree(damaged, ignore_errors=True)
            try:
                folder.rename(self.path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            sync(self._parent)

    @contextmanager
    def named_faults(self) -> Iterator[None]:
        """Turns faults of the file system into what to do about them."""
        try:
            yield
        except OSError as error:
            what = f"tokenised data cannot be written to {self._parent}: {error.strerror or error}"
            if error.errno in _NO_FAULT_OF_THE_CONFIG:
                raise RunError(f"{what}. Make space there, or give another folder as {self._key}") from error
            raise ConfigError.one(self._key, what) from error

    def _hidden(self, suffix: str) -> Path:
        return self._parent / f".{self.path.name}.{suffix}"

    def _remove_leftovers(self) -> None:
        """Delete what killed builders left. Called with the lock, so none makes this cache on this machine."""
        now = time.time()
        for folder in filter(_is_hidden, self._parent.iterdir()):
            with suppress(OSError):
                if self._is_own(folder) or now - _last_change(folder) > _STRANGER_SECONDS:
                    shutil.rmtree(folder)

    def _is_own(self, folder: Path) -> bool:
        return folder.name.startswith(self._hidden(f"{self._host}.").name)


def _is_hidden(folder: Path) -> bool:
    """It has a name that `making` gives: the user may keep other things beside caches."""
    return re.fullmatch(r"\..+\.\w+\.[0-9a-f]{32}", folder.name) is not None


def _last_change(folder: Path) -> float:
    return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
