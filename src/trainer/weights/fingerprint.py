"""A fingerprint of weights: enough to tell another model, another revision or a further trained one."""

import hashlib
from typing import Any

import torch
from torch import Tensor

from trainer.weights.folder import ReadRows, StoredTensor, WeightFiles

_SAMPLED_ROWS = 16
"""Rows of each matrix, evenly spread, the first and the last among them."""
_SAMPLED_ELEMENTS = 1 << 16
"""Of a row, from its beginning: stacks of matrices have long ones."""


def fingerprint(files: WeightFiles) -> str:
    """BLAKE2b over names, dtypes and shapes of all tensors and 16 rows of each, as 16 hex digits.

    It does not depend on how the tensors are dealt to files. Reads some megabytes of a model of any size; a change of
    rows that are not looked at is not seen.

    Raises:
        RunError: a file is damaged.
    """
    samples: dict[str, bytes] = {}
    with files.open_rows() as read:
        for name, stored in files.tensors.items():  # in the order of the bytes
            samples[name] = _sample(read, name, stored)
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(samples):
        stored = files.tensors[name]
        digest.update(f"{name} {stored.dtype} {list(stored.shape)}\n".encode() + samples[name])
    return digest.hexdigest()


def _sample(read: ReadRows, name: str, stored: StoredTensor) -> bytes:
    """BLAKE2b of some rows; a vector is read like one row."""
    digest = hashlib.blake2b(digest_size=16)
    if len(stored.shape) < 2:
        _add(digest, read(name, 0, stored.num_rows))
        return digest.digest()
    count = min(_SAMPLED_ROWS, stored.num_rows)
    for sample in range(count):
        row = sample * (stored.num_rows - 1) // max(count - 1, 1)
        _add(digest, read(name, row, row + 1))
    return digest.digest()


def _add(digest: "hashlib.blake2b", values: Tensor) -> None:
    sampled = values.flatten()[:_SAMPLED_ELEMENTS].contiguous()
    numbers: Any = sampled.view(torch.uint8).numpy()
    digest.update(memoryview(numbers))
