"""What is to be tokenised: the files of the inputs in their order, or a Hugging Face dataset; and its parts, the tasks.

Order and tasks follow from the inputs alone, never from the number of workers: so do the shards.
"""

import heapq
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.tokenize import TokenizeConfig

FORMATS = {".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".jsonl.zst": "jsonl", ".parquet": "parquet", ".txt": "txt"}
TASK_BYTES = 64 * 2**20
MAX_TASKS = 1024


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file of documents."""

    path: str
    format: str
    """Value of FORMATS."""

    size: int
    """Bytes."""

    mtime_ns: int


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """A split of a Hugging Face dataset."""

    name: str
    subset: str | None
    split: str
    revision: str | None
    streaming: bool

    def options(self) -> dict[str, Any]:
        """Arguments of `datasets.load_dataset` beside name and streaming."""
        options = {"name": self.subset, "split": self.split, "revision": self.revision}
        return {key: value for key, value in options.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A part of the work: it makes the shards whose names begin with its number."""

    number: int
    files: tuple[SourceFile, ...] = ()
    hub: HubDataset | None = None
    num_tasks: int
    """Of the whole work: a task of a hub dataset takes this share of it."""

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.size for file in self.files)


def find_sources(config: TokenizeConfig) -> tuple[list[SourceFile], HubDataset | None]:
    """The files of `config.inputs` in order (those of a folder sorted by path), or the dataset they name.

    Raises:
        ConfigError: an input is missing, unreadable, of another format, given twice, or without any document file.
    """
    hub = [name for name in config.inputs if not Path(name).exists() and _may_be_dataset(name)]
    if hub:
        if len(config.inputs) > 1:
            message = f"there is no file or folder {hub[0]}, and a Hugging Face dataset must be the only input"
            raise ConfigError.one("inputs", message)
        return [], HubDataset(
            name=hub[0],
            subset=config.subset,
            split=config.split,
            revision=config.revision,
            streaming=config.streaming,
        )
    files: list[SourceFile] = []
    seen: dict[str, str] = {}
    for path in (path for name in config.inputs for path in _files_of(Path(name))):
        real = os.path.realpath(path)
        if real in seen:
            again = f" (as {seen[real]})" if seen[real] != str(path) else ""
            raise ConfigError.one("inputs", f"{path} is given twice{again}; its documents would be there twice")
        seen[real] = str(path)
        files.append(_source_file(path))
    return files, None


def split_tasks(files: list[SourceFile], hub: HubDataset | None, num_tasks: int | None) -> list[Task]:
    """The tasks, each with files of about the same size in all, in their order."""
    if hub is not None:
        count = num_tasks or 1
        return [Task(number=number, hub=hub, num_tasks=count) for number in range(count)]
    if num_tasks is None:
        num_tasks = min(-(-sum(file.size for file in files) // TASK_BYTES), MAX_TASKS)
    count = max(1, min(num_tasks, len(files)))
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, 0, number) for number in range(count)]  # bytes, files, task
    for place in sorted(range(len(files)), key=lambda place: (-files[place].size, place)):
        size, length, number = loads[0]
        groups[number].append(place)
        heapq.heapreplace(loads, (size + files[place].size, length + 1, number))
    return [
        Task(number=number, files=tuple(files[place] for place in sorted(group)), num_tasks=count)
        for number, group in enumerate(groups)
    ]


def _may_be_dataset(name: str) -> bool:
    """Not evidently a path: `org/dataset` or `dataset`."""
    evident = name.startswith((".", "~", "/")) or name.endswith("/") or name.count("/") > 1
    return not evident and _format_of(name) is None and Path(name).suffix not in (".json", ".gz", ".zst", ".csv")


def _format_of(name: str) -> str | None:
    return next((kind for suffix, kind in FORMATS.items() if name.lower().endswith(suffix)), None)


def _files_of(path: Path) -> list[Path]:
    known = ", ".join(FORMATS)
    if path.is_file():
        if _format_of(path.name) is None:
            raise ConfigError.one("inputs", f"{path}: only files that end with {known} can be read")
        return [path]
    if not path.is_dir():
        what = "is neither a file nor a folder: write the text to a file first" if path.exists() else "does not exist"
        raise ConfigError.one("inputs", f"{path} {what}")
    found = sorted(_walk(path))
    files = [file for file in found if _format_of(file.name) is not None]
    if not files:
        others = f"; it holds others, {found[0].name} for one" if found else ""
        raise ConfigError.one("inputs", f"the folder {path} holds no file that ends with {known}{others}")
    return files


def _walk(folder: Path) -> Iterator[Path]:
    """Files below a folder; hidden ones and hidden folders are passed over."""

    def refuse(error: OSError) -> None:
        raise ConfigError.one("inputs", f"{error.filename} cannot be read ({error.strerror})") from error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent) / name for name in names if not name.startswith("."))


def _source_file(path: Path) -> SourceFile:
    kind = _format_of(path.name)
    assert kind is not None
    try:
        with path.open("rb"):
            status = path.stat()
    except OSError as error:
        raise ConfigError.one("inputs", f"{path} cannot be read ({error.strerror})") from error
    if path.name.lower().endswith(".zst"):
        from fsspec.compression import compr

        if "zstd" not in compr:
            message = f"{path}: the package zstandard is needed to read .zst and is not installed; compress with gzip"
            raise ConfigError.one("inputs", message)
    return SourceFile(path=str(path), format=kind, size=status.st_size, mtime_ns=status.st_mtime_ns)
