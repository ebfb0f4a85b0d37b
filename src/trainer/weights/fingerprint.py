"""A fingerprint of a folder's weights: enough to tell another model, another revision or a further trained one."""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from configs.errors import ConfigError
from trainer.weights.folder import open_weights

_SAMPLED_ROWS = 16
"""Rows of each tensor, evenly spread, the first and the last among them."""


def fingerprint(folder: Path) -> str:
    """BLAKE2b over names, dtypes and shapes of all tensors and 16 rows of each, as 16 hex digits.

    It does not depend on how the tensors are dealt to files. Reads some megabytes of a model of any size; a change of
    rows that are not looked at is not seen.

    Raises:
        ConfigError: the weights are missing or damaged.
    """
    tensors = open_weights(folder).tensors
    digest = hashlib.blake2b(digest_size=8)
    parts: dict[str, bytes] = {}
    for path in dict.fromkeys(stored.file for stored in tensors.values()):
        names = [name for name, stored in tensors.items() if stored.file == path]
        try:
            with safe_open(path, framework="pt") as reader:
                for name in names:
                    parts[name] = _sample(reader.get_slice(name), tensors[name].shape)
        except (SafetensorError, OSError) as error:
            raise ConfigError.one("model.name", f"{path} is damaged or cut short ({error}); fetch it anew") from error
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}\n".encode() + parts[name])
    return digest.hexdigest()


def _sample(stored: Any, shape: tuple[int, ...]) -> bytes:
    """BLAKE2b of some rows: of the last dimension; a tensor with one dimension or none is a row as a whole."""
    digest = hashlib.blake2b(digest_size=16)
    for row in _rows(shape):
        values = stored[row] if row else stored[...]
        digest.update(memoryview(values.contiguous().view(-1).view(torch.uint8).numpy()))
    return digest.digest()


def _rows(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Where the sampled rows lie, as slices of all dimensions but the last."""
    outer = shape[:-1]
    count = math.prod(outer)
    if math.prod(shape) == 0:
        return
    for sample in dict.fromkeys(index * (count - 1) // (_SAMPLED_ROWS - 1) for index in range(_SAMPLED_ROWS)):
        places = []
        for size in reversed(outer):
            sample, place = divmod(sample, size)
            places.append(slice(place, place + 1))
        yield tuple(reversed(places))
