"""What a round found out about each piece: from the device to host arrays without a wait, then added up over ranks.

Each piece is scored by one rank, or by those that share its row, each for its own positions. So the sum over ranks
only brings the numbers together. What is made of them is computed on the host, in float64 and in the order of the data.
So no metric can depend on the number of ranks, on the rows of a forward pass or on the order of packing but by the
rounding of the forward pass itself, and of a float64 sum over a shared row.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from models.base import LossOutput
from models.batch import Batch
from trainer.parallel.mesh import Mesh
from trainer.validation.task import NUM_RESULTS

WAIT_LABEL = "wait for an earlier pass of validation"

_NUM_SUMS = 3
"""Results that come from the device: nats, nats of text, hits."""

_MAX_UNDER_WAY = 4
"""Passes enqueued and not yet read. The host may be this many ahead of the device, so that the device always has
something to do."""

_CHUNK_PIECES = 1 << 18
"""Pieces that are added up over ranks at once: 10 MiB on the device."""


def segment_sums(output: LossOutput, batch: Batch, text_ids: Tensor | None) -> Tensor:
    """Sums over each segment of a batch, on its device. No host sync.

    Args:
        output: of the model for the batch.
        batch: what it was given.
        text_ids: (vocab_size,) bool; None counts every token as text.

    Returns:
        (3, bucket) float64: nats, nats of text, hits (0 when they were not asked for). The segments of the batch come
        first; what follows up to its bucket is 0.
    """
    nats = output.nats.double().flatten()
    text_nats = nats if text_ids is None else torch.where(text_ids[batch.labels.flatten().clamp(min=0)], nats, 0.0)
    hits = torch.zeros_like(nats) if output.greedy_hits is None else output.greedy_hits.flatten().double()
    # One reduction for all three, which lie one after the other. The order of addition is that of the positions, and
    # the same every time, which atomics (index_add) would not promise.
    borders, length = batch.segments.cu_seqlens.long(), nats.numel()
    offsets = torch.cat([borders[:-1], borders[:-1] + length, borders + 2 * length])
    sums = torch.segment_reduce(torch.cat([nats, text_nats, hits]), "sum", offsets=offsets, initial=0, unsafe=True)
    return sums.view(_NUM_SUMS, -1)


@dataclass(frozen=True, kw_only=True)
class _UnderWay:
    """Sums of a pass on their way to the host."""

    results: np.ndarray
    """(num_pieces, NUM_RESULTS) where they belong."""

    pieces: np.ndarray
    counts: np.ndarray
    sums: Tensor
    """(3, bucket) float64 in host memory, valid once `ready` has passed."""

    ready: "torch.cuda.Event | None"

    def read(self) -> None:
        if self.ready is not None:
            # Deliberate: for a pass that was enqueued _MAX_UNDER_WAY passes ago.
            with torch.profiler.record_function(WAIT_LABEL):
                self.ready.synchronize()
        real = self.pieces >= 0
        found = np.hstack([self.sums.numpy()[:, : len(real)].T, self.counts])
        np.add.at(self.results, self.pieces[real], found[real])


class RoundResults:
    """This rank's results of a round, 40 bytes of host memory for each piece."""

    def __init__(self, num_pieces: Sequence[int]) -> None:
        """
        Args:
            num_pieces: of each task.
        """
        self._arrays = [np.zeros((count, NUM_RESULTS)) for count in num_pieces]
        self._under_way: deque[_UnderWay] = deque()

    def collect(self, task: int, sums: Tensor, *, pieces: np.ndarray, counts: np.ndarray) -> None:
        """Take the results of a pass. They are read a few passes later.

        Args:
            task: number of the task.
            sums: (3, bucket) float64 of `segment_sums`.
            pieces: (segments,) int64 piece of each segment, -1 for padding.
            counts: (segments, 2) int64 scored tokens and their bytes.
        """
        ready = None
        if sums.is_cuda:
            host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            host.copy_(sums, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            sums = host
        self._under_way.append(
            _UnderWay(results=self._arrays[task], pieces=pieces, counts=counts, sums=sums, ready=ready)
        )
        if len(self._under_way) > _MAX_UNDER_WAY:
            self._under_way.popleft().read()

    def read(self) -> list[np.ndarray]:
        """Wait for all passes. (num_pieces, NUM_RESULTS) float64 per task; 0 for pieces of other ranks."""
        while self._under_way:
            self._under_way.popleft().read()
        return self._arrays


def add_up(arrays: Sequence[np.ndarray], mesh: Mesh) -> None:
    """Add results up over ranks, in place. Collective; on every rank arrays of the same shapes."""
    if mesh.world_size == 1:
        return
    for array in arrays:
        for start in range(0, len(array), _CHUNK_PIECES):
            chunk = torch.from_numpy(array[start : start + _CHUNK_PIECES])
            on_device = chunk.to(mesh.device)
            dist.all_reduce(on_device)
            chunk.copy_(on_device)  # deliberate wait, at the end of a round
