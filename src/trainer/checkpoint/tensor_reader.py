"""Single tensors out of a checkpoint, without code from it and without more memory than the tensor takes.

The library's loader would do, but it copies each stored part twice on its way and holds the interpreter lock
meanwhile; an export in the background of a training must not.
"""

import io
import os
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer.checkpoint.agreement import describe
from trainer.errors import RunError

_ZIP_HEADER = struct.Struct("<26xHH")
"""The fixed part of what stands before each file in a zip archive, with the lengths of the two parts that follow."""


class TensorReader:
    """Reads tensors of one checkpoint by name."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        """
        Args:
            path: folder of the checkpoint.
            metadata: where its tensors lie, from `read_checkpoint`.
        """
        self._path = path
        self._metadata = metadata

    @property
    def names(self) -> Sequence[str]:
        """All tensors."""
        return list(self._metadata.state_dict_metadata)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entry(name).size)

    def dtype(self, name: str) -> torch.dtype:
        properties: TensorProperties = self._entry(name).properties
        return properties.dtype

    def read(self, name: str, into: Tensor) -> Tensor:
        """Fill `into` with the whole tensor, and give it back.

        Args:
            into: contiguous, on the CPU, of its shape and dtype.

        Raises:
            RunError: it cannot be read, or the file holds something else.
        """
        return self._fill(name, into, 0)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """(stop - start, ...) rows of a tensor; one without dimensions is one row, and comes whole.

        Raises:
            RunError: as in `read`.
        """
        shape = self.shape(name)
        rows = torch.empty((stop - start, *shape[1:]) if shape else (), dtype=self.dtype(name))
        return self._fill(name, rows, start)

    def _fill(self, name: str, into: Tensor, start: int) -> Tensor:
        """Fill `into` with as many rows as it has, from `start` on."""
        stop = start + (into.size(0) if into.dim() else 1)
        for chunk in self._entry(name).chunks:
            offset, size = (*chunk.offsets, 0)[0], (*chunk.sizes, 1)[0]
            first, last = max(start, offset), min(stop, offset + size)
            if first >= last or 0 in chunk.sizes:
                continue
            part = into[first - start : last - start] if into.dim() else into
            for dim, bounds in enumerate(zip(chunk.offsets[1:], chunk.sizes[1:], strict=True), 1):
                part = part.narrow(dim, *bounds)
            try:
                if part.is_contiguous():
                    self._read_chunk(name, chunk, part, first - offset)
                else:
                    found = torch.empty(part.shape, dtype=part.dtype)
                    part.copy_(self._read_chunk(name, chunk, found, first - offset))
            except OSError as error:
                raise RunError(f"{name} in {self._path} cannot be read: {describe(error)}") from error
        return into

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), "read_metadata refuses anything else"
        return entry

    def _read_chunk(self, name: str, chunk: ChunkStorageMetadata, into: Tensor, first_row: int) -> Tensor:
        """Fill the contiguous `into` with a stored part, or with as many rows of it as it has from `first_row` on."""
        info = self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        stored = torch.empty(chunk.sizes, dtype=into.dtype, device="meta")
        with (self._path / info.relative_path).open("rb") as file:
            start = _data_offset(_Part(file.fileno(), info.offset, info.length), stored)
            if start is None or start + stored.nbytes > info.length:
                raise RunError(
                    f"{name} in {self._path / info.relative_path} is not stored as .metadata says: the file is damaged"
                )
            start += first_row * (stored[0].nbytes if first_row else 0)
            target = memoryview(cast(Any, into.view(-1).view(torch.uint8).numpy()))
            done = 0
            while done < into.nbytes:
                count = os.preadv(file.fileno(), [target[done:]], info.offset + start + done)
                if count == 0:
                    raise RunError(f"{self._path / info.relative_path} is cut short")
                done += count
        return into


def _data_offset(stored: io.RawIOBase, like: Tensor) -> int | None:
    """Where the numbers begin in a tensor written by torch.save; None if it is not laid out like `like`.

    Args:
        stored: the stored tensor as a file of its own: a zip archive.
        like: shape and dtype that it should have, contiguous.
    """
    try:
        with torch.serialization.skip_data():  # the description only
            found = torch.load(cast(Any, stored), weights_only=True)
        if not isinstance(found, Tensor) or found.shape != like.shape or found.dtype != like.dtype:
            return None
        if not found.is_contiguous() or found.storage_offset():
            return None
        entries = [entry for entry in zipfile.ZipFile(cast(Any, stored)).infolist() if "/data/" in entry.filename]
        if len(entries) != 1 or entries[0].compress_type != zipfile.ZIP_STORED or entries[0].file_size < like.nbytes:
            return None
        stored.seek(entries[0].header_offset)
        name_length, extra_length = _ZIP_HEADER.unpack(cast(bytes, stored.read(_ZIP_HEADER.size)))
    except OSError:
        raise
    except Exception:  # whatever a damaged or forged description makes torch and zipfile raise
        return None
    return entries[0].header_offset + _ZIP_HEADER.size + name_length + extra_length


class _Part(io.RawIOBase):
    """Some bytes of an open file as a file of its own. The library's own class of this kind seeks wrongly from the
    end."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._offset, self._length = descriptor, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError("seek before the beginning")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        wanted = max(0, min(len(buffer), self._length - self._position))
        count = os.preadv(self._descriptor, [memoryview(buffer)[:wanted]], self._offset + self._position)
        self._position += count
        return count
