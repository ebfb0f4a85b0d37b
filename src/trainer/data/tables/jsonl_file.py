"""A file with one JSON object per line, plain or packed with gzip.

One pass notes where every 64th row begins: an index of 16 bytes per 64 rows, so that any row is found by reading at
most 64 lines, whatever the size of the file. A packed file cannot be entered in the middle: there the reader stays
where the last range ended, and goes on from there if the next one lies ahead.
"""

import gzip
import io
import os
from array import array
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, BinaryIO, cast

import orjson

from trainer.data.errors import PlacedError
from trainer.data.tables.json_text import describe, read_json
from trainer.data.tables.local_files import LocalFile, named_faults, require_unchanged

_STRIDE = 64
_BOM = b"\xef\xbb\xbf"
_BUFFER = 1 << 18


_Lines = Generator[tuple[int, int, bytes], None, None]
"""Number from 1, offset in bytes, and content of lines."""


@dataclass(frozen=True, kw_only=True)
class _Index:
    num_rows: int
    offsets: array
    """Bytes before the line of every _STRIDE-th row."""

    lines: array
    """Numbers of these lines, from 1."""


class JsonlFile:
    """Rows of a file, by number. Blank lines are none."""

    def __init__(self, file: LocalFile) -> None:
        self._file = file
        self._packed = file.format == "jsonl.gz"
        self._kept: tuple[int, _Lines] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None}

    @property
    def num_rows(self) -> int:
        return self._index.num_rows

    def rows(self, start: int, stop: int) -> Iterator[dict[str, Any]]:
        """Rows from `start` up to `stop`; see Part.rows."""
        for number, line in self._lines(start, stop):
            try:
                # Looking for long numbers takes longer than reading, and plain messages have none.
                row = read_json(line) if b'"tool' in line else orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise PlacedError(f"{self._place(number)} {_not_json(line, error)}") from None
            if not isinstance(row, dict):
                raise PlacedError(f"{self._place(number)} is {describe(row)}; every line must be one object")
            yield row

    def place(self, row: int) -> str:
        """File and line of a row."""
        return self._place(next(self._lines(row, row + 1))[0])

    def _place(self, line: int) -> str:
        return f"{self._file.path}, line {line}"

    def _lines(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Numbers and contents of the lines of rows `start` up to `stop`."""
        if start >= stop:
            return
        with named_faults(self._file):
            position, stream = self._enter(start)
            for number, _, line in islice(stream, start - position, stop - position):
                yield number, line
            if self._packed:
                self._kept = stop, stream

    def _enter(self, start: int) -> tuple[int, _Lines]:
        """A stream of rows that begins at or before `start`, and the row with which it does."""
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] <= start:
            return kept
        if self._packed:
            return 0, self._stream(line=1, offset=0)
        block = start // _STRIDE
        return block * _STRIDE, self._stream(line=self._index.lines[block], offset=self._index.offsets[block])

    def _stream(self, *, line: int, offset: int) -> _Lines:
        """The lines that are not blank, from the one with this number and offset on."""
        with self._open() as opened:
            opened.seek(offset)
            for content in opened:
                # Some editors put a mark before the first line, which is no JSON.
                text = content.removeprefix(_BOM) if line == 1 else content
                if text and not text.isspace():
                    yield line, offset, text
                line += 1
                offset += len(content)

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        with self._file.path.open("rb", buffering=_BUFFER) as opened:
            require_unchanged(self._file, os.fstat(opened.fileno()))
            if not self._packed:
                yield opened
                return
            with gzip.GzipFile(fileobj=opened) as packed:
                yield io.BufferedReader(cast(io.RawIOBase, packed), _BUFFER)

    @cached_property
    def _index(self) -> _Index:
        offsets, lines = array("q"), array("q")
        num_rows = 0
        with named_faults(self._file):
            for number, offset, _ in self._stream(line=1, offset=0):
                if num_rows % _STRIDE == 0:
                    offsets.append(offset)
                    lines.append(number)
                num_rows += 1
        return _Index(num_rows=num_rows, offsets=offsets, lines=lines)


def _not_json(line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        line.decode()
    except UnicodeDecodeError as wrong:
        return f"is not UTF-8: byte 0x{line[wrong.start]:02x} at byte {wrong.start + 1} of the line"
    hint = "; write every row as one object on one line" if line.strip() in (b"[", b"{") else ""
    return f"is not JSON: {error.msg} at character {error.colno}{hint}"
