"""Documents of a source, through datatrove's readers, made strict: they pass over what they cannot read with a warning
at most, and here nothing is lost unsaid. A bad row ends the work or is counted, an empty document is counted.
"""

import io
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow
from datatrove.data import Document
from datatrove.io import DataFolder
from datatrove.pipeline.readers.base import BaseDiskReader
from datatrove.pipeline.readers.huggingface import HuggingFaceDatasetReader
from datatrove.pipeline.readers.jsonl import JsonlReader
from datatrove.pipeline.readers.parquet import ParquetReader
from fsspec.compression import compr
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

from trainer.errors import RunError
from trainer.text import first_line
from trainer.tokenize.sources import HubDataset, SourceFile, Task

_READ_ERRORS = (OSError, EOFError, ValueError, NotImplementedError, zlib.error, pyarrow.ArrowException)
"""What damaged or unreadable files raise; ArrowInvalid, UnicodeDecodeError and BadGzipFile are among them."""


_UNPACK: dict[Any, Any] = compr


@dataclass(kw_only=True)
class Intake:
    """What every row passes through on its way to a document."""

    text_key: str
    drop_bad: bool
    """Count rows that are no document instead of ending."""

    empty: int = 0
    """Documents without text, left out."""

    bad: int = 0
    """Rows that are no document, left out."""

    tell: Callable[[], int] = lambda: 0
    """Bytes read so far of the file that is being read."""

    finished_bytes: int = 0
    """Bytes of the files that were read to their end."""

    @property
    def position(self) -> int:
        """Bytes of the source files read so far."""
        return self.finished_bytes + self.tell()

    def document(self, row: Any, place: str, number: int) -> Document | None:
        """The document of a row; None if it is left out.

        Raises:
            RunError: it is none, and such rows are not to be dropped.
        """
        if not isinstance(row, dict):
            return self.reject(f"{place} {number}", f"is a JSON {type(row).__name__}, not an object")
        text = row.get(self.text_key)
        if not isinstance(text, str):
            if self.text_key in row:
                reason = f"has {type(text).__name__} at {self.text_key!r}, not text"
            else:
                reason = f"has no {self.text_key!r}; its keys are {', '.join(map(repr, list(row)[:8])) or 'none'}"
            return self.reject(f"{place} {number}", f"{reason} (text_key names the key)")
        return self.keep(text)

    def keep(self, text: str) -> Document | None:
        if text:
            return Document(text=text, id="")
        self.empty += 1
        return None

    def reject(self, place: str, reason: str) -> None:
        if not self.drop_bad:
            raise RunError(f'{place} {reason}. bad_documents = "drop" leaves such documents out and counts them')
        self.bad += 1


def read_task(task: Task, intake: Intake) -> Generator[Document, None, None]:
    """The documents of a task, in order.

    Raises:
        RunError: a row or file cannot be read, naming it.
    """
    if task.hub is not None:
        yield from _read_hub(task.hub, intake, rank=task.number, world_size=task.num_tasks)
    for file in task.files:
        yield from read_file(file, intake)


def read_file(file: SourceFile, intake: Intake) -> Generator[Document, None, None]:
    """The documents of a file.

    Raises:
        RunError: a row or the file cannot be read, naming it.
    """
    path = Path(file.path).absolute()
    folder = DataFolder(str(path.parent), fs=LocalFileSystem())
    readers = {"jsonl": _Jsonl, "parquet": _Parquet, "txt": _PlainText}
    reader = readers[file.format](folder, intake, file.path)
    try:
        yield from reader.read_file(path.name)
    except _READ_ERRORS as error:
        raise RunError(f"{file.path} cannot be read: {first_line(error)}") from error
    intake.tell = lambda: 0
    intake.finished_bytes += file.size


def _read_hub(hub: HubDataset, intake: Intake, *, rank: int, world_size: int) -> Iterator[Document]:
    reader = _Hub(hub, intake)
    try:
        yield from reader.run(rank=rank, world_size=world_size)
    except RunError:
        raise
    except Exception as error:  # datasets, the hub's client and its network raise every kind
        raise RunError(f"the dataset {hub.name} cannot be read: {first_line(error)}") from error


def open_hub(hub: HubDataset) -> tuple[int, int | None]:
    """Number of shards of a dataset and, where it is known, of rows; opens it.

    Raises:
        RunError: it cannot be loaded.
    """
    from datasets import load_dataset

    try:
        dataset: Any = load_dataset(hub.name, **hub.options(), streaming=hub.streaming)
    except Exception as error:  # as above
        raise RunError(f"{type(error).__name__}: {first_line(error)}") from error
    splits = dataset.info.splits or {}
    info = splits.get(hub.split)
    num_rows = info.num_examples if info is not None else None
    return (dataset.num_shards, num_rows) if hub.streaming else (1, len(dataset))


class _Jsonl(JsonlReader):
    """One document per line. datatrove's own passes over lines that are no JSON and ends quietly at bytes that are not
    UTF-8."""

    def __init__(self, folder: DataFolder, intake: Intake, shown: str) -> None:
        super().__init__(folder)
        self._intake, self._shown = intake, shown

    def read_file(self, filepath: str) -> Iterator[Document]:
        compression = infer_compression(filepath.lower())
        # The raw file tells how far it was read, which a compressed one does not.
        with self.data_folder.open(filepath, "rb") as raw:
            self._intake.tell = raw.tell
            unpacked = io.BufferedReader(_UNPACK[compression](raw, mode="rb")) if compression else raw
            place = f"{self._shown}, line"
            for number, line in enumerate(unpacked, start=1):
                if line.isspace():
                    continue
                try:
                    row = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    self._intake.reject(f"{place} {number}", f"is not JSON: {error}")
                    continue
                document = self._intake.document(row, place, number)
                if document is not None:
                    yield document


class _Parquet(ParquetReader):
    """One document per row; only the text column is read."""

    def __init__(self, folder: DataFolder, intake: Intake, shown: str) -> None:
        super().__init__(folder, read_metadata=False, text_key=intake.text_key, id_key=intake.text_key)
        self._intake, self._shown = intake, shown
        self._rows = 0

    def read_file(self, filepath: str) -> Iterator[Document]:
        import pyarrow.parquet as pq

        with self.data_folder.open(filepath, "rb") as raw:
            metadata, columns = pq.read_metadata(raw), pq.read_schema(raw).names
        if self.text_key not in columns:
            raise RunError(
                f"{self._shown} has no column {self.text_key!r}; its columns are {', '.join(map(repr, columns[:8]))} "
                "(text_key names the column)"
            )
        size = Path(self.data_folder.path, filepath).stat().st_size
        self._intake.tell = lambda: size * self._rows // max(1, metadata.num_rows)
        yield from super().read_file(filepath)

    def get_document_from_dict(self, data: dict, source_file: str, id_in_file: int | str) -> Document | None:
        # datatrove numbers only the rows that it keeps.
        self._rows += 1
        return self._intake.document(data, f"{self._shown}, row", self._rows)


class _PlainText(BaseDiskReader):
    """One document per file."""

    name = "plain text"

    def __init__(self, folder: DataFolder, intake: Intake, shown: str) -> None:
        super().__init__(folder)
        self._intake, self._shown = intake, shown

    def read_file(self, filepath: str) -> Iterator[Document]:
        with self.data_folder.open(filepath, "rb") as raw:
            content: bytes = raw.read()
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            byte = content[error.start]
            self._intake.reject(self._shown, f"is not UTF-8: byte 0x{byte:02x} at offset {error.start}")
            return
        document = self._intake.keep(text)
        if document is not None:
            yield document


class _Hub(HuggingFaceDatasetReader):
    """One document per row of a dataset."""

    def __init__(self, hub: HubDataset, intake: Intake) -> None:
        super().__init__(hub.name, dataset_options=hub.options(), streaming=hub.streaming, text_key=intake.text_key)
        self._intake = intake
        self._rows = 0

    def get_document_from_dict(self, data: dict, source_file: str, id_in_file: int | str) -> Document | None:
        self._rows += 1
        return self._intake.document(data, f"{source_file}, row", self._rows)
