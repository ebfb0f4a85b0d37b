"""Reading torch.distributed.checkpoint's files without running what they hold.

The library unpickles `.metadata` and every entry that is not a tensor with the full pickle, which runs any function
the file names. Here `.metadata` goes through an unpickler that knows the format's classes and nothing else, entries
that are not tensors are refused, and tensors are read by `torch.load(weights_only=True)`, which DCP passes itself.
"""

import math
import pathlib
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

METADATA_NAME = ".metadata"
FILE_NAME = re.compile(r"__[0-9]+_[0-9]+\.distcp")
"""Names of the files of tensors: nothing that could lie in another folder."""


class DamagedError(Exception):
    """A checkpoint that is not whole or not safe, and why. Callers turn it into a message of their own."""


class _Properties(TensorProperties):
    """torch 2.15 adds the strides to the pickled state, which 2.11 cannot read; we need neither."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:5])


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"layout {name}")
    return torch.strided


_ALLOWED: dict[tuple[str, str], Any] = {
    (dcp_metadata.__name__, "Metadata"): Metadata,
    (dcp_metadata.__name__, "MetadataIndex"): MetadataIndex,
    (dcp_metadata.__name__, "StorageMeta"): StorageMeta,
    (dcp_metadata.__name__, "TensorStorageMetadata"): TensorStorageMetadata,
    (dcp_metadata.__name__, "BytesStorageMetadata"): BytesStorageMetadata,
    (dcp_metadata.__name__, "ChunkStorageMetadata"): ChunkStorageMetadata,
    (dcp_metadata.__name__, "TensorProperties"): _Properties,
    (dcp_metadata.__name__, "_MEM_FORMAT_ENCODING"): dcp_metadata._MEM_FORMAT_ENCODING,
    (_StorageInfo.__module__, "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    # The folder it was written to; Python 3.13 names the module `pathlib._local`. The pure class touches no file.
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        allowed = _ALLOWED.get((module_name, global_name))
        if allowed is not None:
            return allowed
        if module_name == "torch" and isinstance(vars(torch).get(global_name), torch.dtype):
            return vars(torch)[global_name]
        raise DamagedError(f"refused: {METADATA_NAME} names {module_name}.{global_name}, which no checkpoint needs")


def read_metadata(path: Path) -> Metadata:
    """The checked `.metadata` of a checkpoint folder.

    Raises:
        DamagedError: it is missing, cannot be read, names something outside the format, holds entries that are not
            tensors, points outside the folder or past the end of a file, or leaves part of a tensor out.
    """
    try:
        with (path / METADATA_NAME).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except DamagedError:
        raise
    except FileNotFoundError as error:
        raise DamagedError(f"{METADATA_NAME} is missing") from error
    except Exception as error:  # what a broken pickle raises is anyone's guess
        raise DamagedError(f"{METADATA_NAME} cannot be read ({type(error).__name__}: {error})") from error
    try:
        _check_metadata(path, metadata)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise DamagedError(f"{METADATA_NAME} is not of the known format ({error})") from error
    return metadata


def _check_metadata(path: Path, metadata: Metadata) -> None:
    if not isinstance(metadata, Metadata):
        raise DamagedError(f"{METADATA_NAME} is not of the known format (holds a {type(metadata).__name__})")
    sizes = {}
    for index, info in metadata.storage_data.items():
        name = info.relative_path
        if not FILE_NAME.fullmatch(name):
            raise DamagedError(f"refused: {METADATA_NAME} points at {name!r}, which is no file of a checkpoint")
        if info.transform_descriptors:
            raise DamagedError(f"refused: {index.fqn} is stored with {info.transform_descriptors}, not as a tensor")
        if name not in sizes:
            try:
                sizes[name] = (path / name).stat().st_size
            except OSError as error:
                raise DamagedError(f"{name} is missing") from error
        if info.offset < 0 or info.length < 0 or info.offset + info.length > sizes[name]:
            raise DamagedError(f"{name} is cut short: {index.fqn} should end at byte {info.offset + info.length}")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise DamagedError(f"refused: {name} is not a tensor")
        for chunk in entry.chunks:
            borders = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
            if any(offset < 0 or size < 0 or offset + size > total for offset, size, total in borders):
                raise DamagedError(f"{METADATA_NAME} places part of {name} outside of it")
            if MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
                raise DamagedError(f"{METADATA_NAME} does not say where {name} is stored")
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            raise DamagedError(f"{METADATA_NAME} leaves part of {name} out")


class SafeReader(FileSystemReader):
    """DCP's reader on metadata that is already read and checked."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata
