"""Activations in host memory between the forward and the backward pass.

What autograd saves inside a block is copied to the host while the blocks after it run, and copied back while those
after it are run backward. Copies have a stream of their own; no step of it makes the host wait for the device, only the
device's streams wait for each other.

On the GPU there are the activations of the running block and of `max_inflight` others: in the forward pass those whose
copies are under way, at the end of it those of the last blocks, which are not copied at all since the backward pass
begins with them, and in the backward pass those that are fetched ahead.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MIN_BYTES = 2**18
"""Smaller storages stay where they are: a copy of its own costs more than their memory."""


@dataclass(eq=False)
class _Slot:
    """One storage that a block saves views of."""

    num_bytes: int
    on_device: Tensor | None
    """(num_bytes,) uint8, all of the storage, while it is there."""

    on_host: Tensor | None = None
    """Likewise; None where it stays on the device."""

    uses: int = 0
    """Saved views that are still to be handed back."""


@dataclass(frozen=True)
class _View:
    """What autograd keeps in place of a tensor."""

    block: "_Block"
    slot: _Slot
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(eq=False)
class _Block:
    """What one block saved in this forward pass."""

    index: int
    slots: dict[int, _Slot] = field(default_factory=dict)
    """By the address of the storage."""

    copied: "torch.cuda.Event | None" = None
    """The last copy between device and host is done."""

    is_fetched: bool = False


class ActivationOffload:
    """The activations of a model's blocks, which run in order from block 0 on."""

    def __init__(
        self, num_blocks: int, *, max_inflight: int, device: torch.device, allocate: Callable[[int], Tensor]
    ) -> None:
        """
        Args:
            num_blocks: of the model.
            max_inflight: blocks besides the running one whose activations may be on the device.
            device: of the activations.
            allocate: gives (bytes,) uint8 of host memory, pinned where the device is a GPU.
        """
        self._num_blocks, self._max_inflight, self._device = num_blocks, max_inflight, device
        self._allocate = allocate
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host: dict[int, list[Tensor]] = {}
        self._free: dict[int, list[Tensor]] = {}
        self._blocks: dict[int, _Block] = {}

    @contextmanager
    def running(self, index: int, kept: set[int]) -> Iterator[None]:
        """Around the forward pass of block `index`.

        Args:
            kept: addresses of storages that the device holds anyway: parameters, and what all blocks read.
        """
        if index == 0:
            self._blocks = {}
            # Copies out of these buffers go before new ones into them: all are on one stream.
            self._free = {num_bytes: list(buffers) for num_bytes, buffers in self._host.items()}
        self._let_go(index - self._max_inflight - 1)
        block = self._blocks[index] = _Block(index)

        def pack(tensor: Tensor) -> Tensor | _View:
            return self._pack(block, tensor, kept)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield
        if index + self._max_inflight + 1 < self._num_blocks:
            self._copy_out(block)

    def _pack(self, block: _Block, tensor: Tensor, kept: set[int]) -> Tensor | _View:
        # Not the stand-ins that torch.compile traces with, nor whole numbers, of which the host may have copies.
        if type(tensor) is not Tensor or tensor.device != self._device or not tensor.is_floating_point():
            return tensor
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if num_bytes < MIN_BYTES or address in kept:
            return tensor
        slot = block.slots.get(address)
        if slot is None:
            whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (num_bytes,), (1,))
            slot = block.slots[address] = _Slot(num_bytes, whole)
        slot.uses += 1
        return _View(block, slot, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        block, slot = packed.block, packed.slot
        if self._blocks.pop(block.index, None) is block:  # the first of its tensors that the backward pass asks for
            self._fetch(block)
            if block.copied is not None:
                torch.cuda.current_stream(self._device).wait_event(block.copied)
            for index in range(block.index - 1, max(block.index - 1 - self._max_inflight, -1), -1):
                self._fetch(self._blocks[index])
        assert slot.on_device is not None, "each saved tensor is asked for once"
        whole = slot.on_device
        slot.uses -= 1
        if slot.uses == 0:
            slot.on_device = None  # the tensor below is the last owner: its memory is free as soon as it is
        return torch.empty(0, dtype=packed.dtype, device=self._device).set_(
            whole.untyped_storage(), packed.offset, packed.size, packed.stride
        )

    def _copy_out(self, block: _Block) -> None:
        """Start the copies of what the block saved to the host."""
        with self._after_the_device():
            for slot in block.slots.values():
                assert slot.on_device is not None
                slot.on_host = self._host_buffer(slot.num_bytes)
                slot.on_host.copy_(slot.on_device, non_blocking=True)
            block.copied = self._mark()

    def _let_go(self, index: int) -> None:
        """Free a block's memory on the device, once its copies are done."""
        block = self._blocks.get(index)
        if block is None:
            return
        if block.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(block.copied)
        for slot in block.slots.values():
            if slot.on_host is not None:
                slot.on_device = None

    def _fetch(self, block: _Block) -> None:
        """Start the copies of what the block saved back to the device."""
        if block.is_fetched:
            return
        block.is_fetched = True
        missing = [slot for slot in block.slots.values() if slot.on_device is None]
        for slot in missing:
            # On the stream that computes, which will free it: the copies wait for what used this memory before.
            slot.on_device = torch.empty(slot.num_bytes, dtype=torch.uint8, device=self._device)
        if missing:
            with self._after_the_device():
                for slot in missing:
                    assert slot.on_device is not None and slot.on_host is not None
                    slot.on_device.copy_(slot.on_host, non_blocking=True)
                block.copied = self._mark()

    @contextmanager
    def _after_the_device(self) -> Iterator[None]:
        """Copies that begin when all work enqueued so far is done."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _mark(self) -> "torch.cuda.Event | None":
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _host_buffer(self, num_bytes: int) -> Tensor:
        free = self._free.setdefault(num_bytes, [])
        if not free:
            buffer = self._allocate(num_bytes)
            self._host.setdefault(num_bytes, []).append(buffer)
            return buffer
        return free.pop()


def storage_addresses(values: Any) -> set[int]:
    """Addresses of the storages of all tensors in `values`; see `tensors_in`."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(values)}


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in arguments: as they are, in lists, tuples and dicts, or attributes of plain objects."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in tensors_in(value)]
    attributes = vars(values) if hasattr(values, "__dict__") and not isinstance(values, type) else {}
    return [value for value in attributes.values() if isinstance(value, Tensor)]
