"""Local files read as one list of rows."""

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from trainer.data.tables.jsonl_file import JsonlFile
from trainer.data.tables.local_files import content_key, find_files
from trainer.data.tables.parquet_file import ColumnChoice, ParquetFile


class FilePart:
    """A Part of one file or several, in order."""

    def __init__(self, name: str, files: list[JsonlFile] | list[ParquetFile], key: dict[str, Any]) -> None:
        self.name = name
        self.key = key
        self._files = files

    @property
    def num_rows(self) -> int:
        return self._starts[-1]

    def rows(self, start: int, stop: int) -> Iterator[dict[str, Any]]:
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            first, end = self._starts[number], min(stop, self._starts[number + 1])
            yield from self._files[number].rows(start - first, end - first)
            start = end

    def place(self, row: int) -> str:
        number = bisect_right(self._starts, row) - 1
        return self._files[number].place(row - self._starts[number])

    @cached_property
    def _starts(self) -> list[int]:
        """First row of each file, and the number of rows."""
        return list(accumulate((file.num_rows for file in self._files), initial=0))


def open_files(path: Path, split: str | None, choose: ColumnChoice) -> FilePart:
    """The part that a file or folder makes.

    Args:
        choose: which columns of a columnar file are read.

    Raises:
        DataError: see find_files; or a file is damaged, or `choose` refuses its columns.
        OSError: a file cannot be read.
    """
    found = find_files(path, split)
    name = str(path) if split is None or path.is_file() else f"{path} ({split})"
    if found[0].format == "parquet":
        return FilePart(name, [ParquetFile(file, choose) for file in found], content_key(found, path))
    return FilePart(name, [JsonlFile(file) for file in found], content_key(found, path))
