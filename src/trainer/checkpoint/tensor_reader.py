"""Single tensors out of a checkpoint, without code from it and without more memory than the tensor takes.

The library's loader would do, but it copies each stored part twice on its way and holds the interpreter lock
meanwhile; an export in the background of a training must not.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from trainer.checkpoint.agreement import describe
from trainer.errors import RunError


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
            name: of the tensor.
            into: contiguous, on the CPU, of its shape and dtype.

        Raises:
            RunError: it cannot be read, or the file holds something else.
        """
        for chunk in self._entry(name).chunks:
            if 0 in chunk.sizes:
                continue
            part = into
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            try:
                if part.is_contiguous():
                    self._read_chunk(name, chunk, part)
                else:
                    part.copy_(self._read_chunk(name, chunk, torch.empty(part.shape, dtype=part.dtype)))
            except OSError as error:
                raise RunError(f"{name} in {self._path} cannot be read: {describe(error)}") from error
        return into

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), "read_metadata refuses anything else"
        return entry

    def _read_chunk(self, name: str, chunk: ChunkStorageMetadata, into: Tensor) -> Tensor:
        """Fill the contiguous `into` with a stored part."""
        info = self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        with (self._path / info.relative_path).open("rb") as file:
            start = _data_offset(_create_file_view(file, info.offset, info.length), into)  # type: ignore[arg-type]
            if start is None or start + into.nbytes > info.length:
                raise RunError(
                    f"{name} in {self._path / info.relative_path} is not stored as .metadata says: the file is damaged"
                )
            target = memoryview(cast(Any, into.view(-1).view(torch.uint8).numpy()))
            done = 0
            while done < into.nbytes:
                count = os.preadv(file.fileno(), [target[done:]], info.offset + start + done)
                if count == 0:
                    raise RunError(f"{self._path / info.relative_path} is cut short")
                done += count
        return into


def _data_offset(stored: Any, like: Tensor) -> int | None:
    """Where the numbers begin in a tensor written by torch.save; None if it is not laid out like `like`.

    Under FakeTensorMode torch.load reads only the description of the tensor and notes where its numbers lie.
    """
    try:
        with FakeTensorMode():
            found = torch.load(stored, weights_only=True)
        if not isinstance(found, Tensor) or found.shape != like.shape or found.dtype != like.dtype:
            return None
        if not found.is_contiguous():
            return None
        checkpoint_offset: Any = getattr(found.untyped_storage(), "_checkpoint_offset", None)
    except Exception:  # whatever a damaged or forged description makes torch raise
        return None
    return None if checkpoint_offset is None else checkpoint_offset + int(found.storage_offset()) * found.element_size()
