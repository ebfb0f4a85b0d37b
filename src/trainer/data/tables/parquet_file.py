"""A parquet file, row group by row group, a few hundred rows of it in memory.

A row group can only be decoded from its start: the reader stays where the last range ended, and goes on from there if
the next one lies ahead in the same group.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from trainer.data.errors import PlacedError
from trainer.data.tables.arrow_rows import RowMaker
from trainer.data.tables.local_files import LocalFile, named_faults, require_unchanged
from trainer.text import first_line

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_BATCH = 256
"""Rows decoded at once: an agent's conversation may take a megabyte."""
_READ_BYTES = 1 << 16


ColumnChoice = Callable[[list[str], str], list[str] | None]
"""Names of the columns that a file has, and the file as messages call it, to the columns that are read; None: all.
Raises DataError when none of them will do."""


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """Where reading ended."""

    group: int
    position: int
    """The row that `rest` begins with."""

    rest: "pa.RecordBatch"
    stream: Iterator["pa.RecordBatch"]
    """What follows `rest` in the row group."""


class ParquetFile:
    """Rows of a file, by number."""

    def __init__(self, file: LocalFile, choose: ColumnChoice) -> None:
        """Reads the footer.

        Raises:
            DataError: it is damaged, or `choose` refuses its columns.
        """
        self._file = file
        self._kept: _Kept | None = None
        with named_faults(self._file):
            opened = self._open()
            names = opened.schema_arrow.names
            sizes = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
        self._columns = choose(names, str(file.path))
        self._starts = list(accumulate(sizes, initial=0))
        """First row of each row group, and the number of rows."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None}

    @property
    def num_rows(self) -> int:
        return self._starts[-1]

    def rows(self, start: int, stop: int) -> Iterator[dict[str, Any]]:
        """Rows from `start` up to `stop`; see Part.rows."""
        maker: RowMaker | None = None
        for batch in self._batches(start, stop):
            maker = maker or RowMaker(batch.schema)
            try:
                yield from maker.rows(batch)
            except ValueError as error:
                message = f"{self._file.path}, rows from {start + 1} on, cannot be read: {first_line(error)}"
                raise PlacedError(message) from error

    def place(self, row: int) -> str:
        """File and row, from 1."""
        return f"{self._file.path}, row {row + 1}"

    def _batches(self, start: int, stop: int) -> Iterator["pa.RecordBatch"]:
        while start < stop:
            group = bisect_right(self._starts, start) - 1
            end = min(stop, self._starts[group + 1])
            yield from self._batches_of_group(group, start, end)
            start = end

    def _batches_of_group(self, group: int, start: int, stop: int) -> Iterator["pa.RecordBatch"]:
        """The rows `start` up to `stop`, which lie in the row group."""
        kept, self._kept = self._kept, None
        with named_faults(self._file):
            if kept is None or kept.group != group or kept.position > start:
                opened = self._open()
                stream = opened.iter_batches(_BATCH, row_groups=[group], columns=self._columns, use_threads=False)
                kept = _Kept(group=group, position=self._starts[group], rest=_next(stream), stream=stream)
            batch, position, stream = kept.rest, kept.position, kept.stream
            while position < stop:
                end = position + batch.num_rows
                if end > start:
                    first = max(start, position)
                    yield batch.slice(first - position, min(stop, end) - first)
                if end > stop:
                    self._kept = _Kept(group=group, position=stop, rest=batch.slice(stop - position), stream=stream)
                    return
                position = end
                if end < self._starts[group + 1]:
                    batch = _next(stream)
            if position < self._starts[group + 1]:
                self._kept = _Kept(group=group, position=position, rest=batch, stream=stream)

    def _open(self) -> "pq.ParquetFile":
        import pyarrow.parquet as pq

        require_unchanged(self._file, self._file.path.stat())
        # Without either, the columns of a whole row group are read at once, which may be gigabytes.
        return pq.ParquetFile(self._file.path, pre_buffer=False, buffer_size=_READ_BYTES)


def _next(stream: Iterator["pa.RecordBatch"]) -> "pa.RecordBatch":
    batch = next(stream, None)
    if batch is None:
        raise EOFError("it has fewer rows than its footer says")
    return batch
