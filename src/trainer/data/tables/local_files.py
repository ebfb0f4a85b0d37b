"""Which files a part of the data has, and what they are known by.

A folder is read with all below it, hidden files and folders left out, in sorted order. Where files or folders in it
bear the names of splits, one split is taken; where it is not clear what belongs together, the folder is refused.
"""

import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from trainer.data.errors import DataError, PlacedError
from trainer.text import first_line, listed

FORMATS = {".jsonl": "jsonl", ".jsonl.gz": "jsonl.gz", ".json": "jsonl", ".parquet": "parquet"}
_KNOWN_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_NUMBERS = r"([-_]\d+(-of-\d+)?)?"
"""What follows a split's name in the names of its files: train-00000-of-00002."""

_BLOCK = 4096


@dataclass(frozen=True, kw_only=True)
class LocalFile:
    """A file of rows, as it was when the part was opened."""

    path: Path
    format: str
    """Value of FORMATS, or "arrow"."""

    size: int
    """Bytes."""

    mtime_ns: int


def find_files(path: Path, split: str | None) -> list[LocalFile]:
    """The files of a part in their order.

    Args:
        path: a file or folder that exists.
        split: None takes "train" where there are splits, else all files.

    Raises:
        DataError: there are none, or it is not clear which.
        OSError: they cannot be read.
    """
    known = ", ".join(FORMATS)
    if path.is_file():
        if _format_of(path) is None:
            raise DataError(f"{path}: only files that end with {known} can be read")
        if split not in (None, "train") and not _is_of(Path(path.name), str(split)):
            raise DataError(f"{path} is one file and has no split {split!r}; leave the split out")
        chosen = [path]
    elif not path.is_dir():
        raise DataError(f"{path} is neither a file nor a folder")
    else:
        inside = sorted(_walk(path))
        found = _files_of_rows(inside)
        if not found:
            others = f"; it holds others, {inside[0].name} for one" if inside else ""
            raise DataError(f"the folder {path} holds no file that ends with {known}{others}")
        chosen = _of_split(path, found, split)
        formats = {_format_of(file): file for file in chosen}
        if len(formats) > 1:
            names = listed([file.name for file in formats.values()])
            raise DataError(f"{path} holds files of several kinds ({names}), maybe the same rows twice; name the files")
    files = [_local_file(file, str(_format_of(file))) for file in chosen]
    if not any(file.size for file in files):
        raise DataError(f"{path} is empty")
    return files


def only_split(folder: Path) -> str | None:
    """The split that all files of rows in a folder belong to; None where no name speaks of one.

    Raises:
        DataError: there are several, or files beside them.
        OSError: they cannot be read.
    """
    relative = [path.relative_to(folder) for path in _files_of_rows(sorted(_walk(folder)))]
    named = [name for name in _KNOWN_SPLITS if any(_is_of(path, name) for path in relative)]
    if not named:
        return None
    others = [path for path in relative if not _is_of(path, named[0])]
    if others:
        holds = f"{folder} holds {listed(named)}" if len(named) > 1 else f"{folder} holds {named[0]} beside {others[0]}"
        raise DataError(f"{holds}, and it is not clear which to take; name the file or folder")
    return named[0]


def list_tables(folder: Path) -> list[LocalFile]:
    """The files of a folder that `datasets` saved, in sorted order.

    Raises:
        OSError: they cannot be read.
    """
    return [_local_file(path, "arrow") for path in sorted(_walk(folder))]


def content_key(files: list[LocalFile], root: Path) -> dict[str, Any]:
    """Identity of the contents: names, sizes, times of change, and blocks at fixed places.

    Raises:
        OSError: a file cannot be read.
    """
    state = blake2b(digest_size=16)
    for file in files:
        name = file.path.relative_to(root) if file.path != root else file.path.name
        state.update(repr((str(name), file.size, file.mtime_ns)).encode())
        with file.path.open("rb") as opened:
            for place in (0, (file.size - _BLOCK) // 3, (file.size - _BLOCK) * 2 // 3, file.size - _BLOCK):
                opened.seek(max(place, 0))
                state.update(opened.read(_BLOCK))
    return {"files": len(files), "bytes": sum(file.size for file in files), "contents": state.hexdigest()}


def require_unchanged(file: LocalFile, status: os.stat_result) -> None:
    """Check that the file is still the one that was found.

    Raises:
        OSError: it changed.
    """
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
        raise OSError("it changed since it was opened; start again when nobody writes it")


@contextmanager
def named_faults(file: LocalFile) -> Iterator[None]:
    """Reading that fails says which file it was.

    Raises:
        PlacedError: in place of what the file system, gzip or Arrow raise.
    """
    import pyarrow as pa

    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        cause = getattr(error, "strerror", None) or first_line(error)
        raise PlacedError(f"{file.path} cannot be read: {cause}") from error


def _format_of(path: Path) -> str | None:
    name = path.name.lower()
    return next((kind for suffix, kind in FORMATS.items() if name.endswith(suffix)), None)


def _files_of_rows(paths: list[Path]) -> list[Path]:
    """The files that can be read. `.json` beside others is about the rows (dataset_infos.json), it holds none."""
    known = [path for path in paths if _format_of(path) is not None]
    return [path for path in known if path.suffix.lower() != ".json"] or known


def _walk(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent) / name for name in names if not name.startswith("."))


def _is_of(relative: Path, split: str) -> bool:
    """The file, or a folder on the way to it, is named after the split."""
    stem = relative.name.partition(".")[0]
    return split in relative.parts[:-1] or re.fullmatch(re.escape(split) + _NUMBERS, stem) is not None


def _of_split(folder: Path, files: list[Path], split: str | None) -> list[Path]:
    relative = {file: file.relative_to(folder) for file in files}
    chosen = [file for file in files if _is_of(relative[file], split or "train")]
    named = [name for name in _KNOWN_SPLITS if any(_is_of(path, name) for path in relative.values())]
    if split is not None:
        if not chosen:
            there = f"; there are {', '.join(named)}" if named else ""
            raise DataError(f"{folder} holds no file or folder that is named after the split {split!r}{there}")
        return chosen
    if not named:
        return files
    unclear = [path for path in relative.values() if not any(_is_of(path, name) for name in _KNOWN_SPLITS)]
    if not chosen or unclear:
        beside = f" beside {unclear[0]}" if unclear else ""
        raise DataError(f"{folder} holds the splits {', '.join(named)}{beside}: say in splits which to take")
    return chosen


def _local_file(path: Path, kind: str) -> LocalFile:
    if not path.is_file():
        raise DataError(f"{path} is no regular file")
    with path.open("rb"):
        status = path.stat()
    return LocalFile(path=path, format=kind, size=status.st_size, mtime_ns=status.st_mtime_ns)
