"""Writing of safetensors files, one tensor in memory at a time.

`safetensors.torch.save_file` takes a whole shard as tensors and copies it into bytes with the interpreter lock held.
The format is a JSON header and the tensors' bytes, and the header follows from names, shapes and dtypes alone:
https://huggingface.co/docs/safetensors
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.files import write_whole
from trainer.weights.folder import INDEX_FILE, SINGLE_FILE

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors files call dtypes."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def can_write(dtype: torch.dtype) -> bool:
    """Whether the format, as written here, knows the dtype."""
    return dtype in DTYPE_NAMES


def write_safetensors(
    folder: Path,
    entries: Sequence[TensorEntry],
    read: Callable[[str], Tensor],
    *,
    max_shard_bytes: int,
    on_progress: Callable[[int], None],
    single_file: str = SINGLE_FILE,
) -> None:
    """Write `model.safetensors`, or shards of it with an index, and wait until they are on disk.

    Args:
        entries: what to write, in this order.
        read: gives a tensor of the entry's shape and dtype, on the CPU. It is written before the next is asked for.
        max_shard_bytes: a file holds no more than this, unless one tensor alone does.
        on_progress: told the bytes written so far, after each tensor.
        single_file: name of the file where there is one only.

    Raises:
        OSError: they cannot be written.
    """
    shards = plan_shards(entries, max_shard_bytes)
    names = [single_file] if len(shards) == 1 else shard_names(len(shards))
    done = 0
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            file.write(_header(shard))
            for entry in shard:
                tensor = read(entry.name)
                assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), entry.name
                numbers: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
                file.write(memoryview(numbers))
                done += entry.num_bytes
                on_progress(done)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        index = {"metadata": {"total_size": done}, "weight_map": dict(sorted(weight_map.items()))}
        write_whole(folder / INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode())


def plan_shards(entries: Sequence[TensorEntry], max_shard_bytes: int) -> list[list[TensorEntry]]:
    """Cut the entries into files of at most `max_shard_bytes`, in order; a larger tensor has a file of its own."""
    shards: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    # Readers map the file: with the widest dtypes first every tensor lies at a multiple of its element size.
    return [sorted(shard, key=lambda entry: -entry.dtype.itemsize) for shard in shards]


def shard_names(count: int) -> list[str]:
    """The names that Hugging Face libraries look for."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _header(entries: Sequence[TensorEntry]) -> bytes:
    """Length of the JSON (8 bytes) and the JSON, padded so that the first tensor lies at a multiple of 8."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        end = start + entry.num_bytes
        header[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
