"""Host memory that a GPU copies from and to by itself, without waiting for the host."""

import mmap
import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor


def pinned_zeros(shape: Sequence[int], dtype: torch.dtype, *, pin: bool) -> Tensor:
    """A CPU tensor of zeros in pages of its own, freed with its last view.

    Not `torch.zeros(pin_memory=True)`: that allocator rounds every size up to a power of two, and keeps what is freed.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        pin: whether there is a GPU to pin it for.

    Raises:
        RuntimeError: the memory cannot be pinned.
        OSError: there is not so much memory.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes == 0 or not pin:
        return torch.zeros(shape, dtype=dtype)
    # Pages of its own, since pinning works on whole pages and a page cannot be pinned twice.
    pages = mmap.mmap(-1, num_bytes)
    tensor = torch.frombuffer(pages, dtype=dtype).view(shape)
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(tensor.data_ptr(), num_bytes, 0)))
    weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, tensor.data_ptr())
    return tensor
