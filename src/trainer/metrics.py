"""Step statistics: collected on the device, reduced over ranks with one SUM and one MAX, read one step later.

Reading at once would make the host wait for every step; so the reduced vectors of step k are copied to pinned memory
and read after the backward pass of step k + 1 has been enqueued. Every rank reads the same numbers at the same point,
so ranks never disagree on what follows from them.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.parallel.mesh import Mesh

WAIT_LABEL = "wait for the step before"

Mark = torch.cuda.Event | float
"""A moment of the device's work: see DeviceClock."""


class DeviceClock:
    """Points in time of the device's work: CUDA events, or the host's clock where the device is the host."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Mark:
        """The moment when all work enqueued so far is done."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks that have passed."""
        if isinstance(start, float) and isinstance(end, float):
            return end - start
        assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end) / 1e3


@dataclass(frozen=True, kw_only=True)
class PendingMetrics:
    """Reduced statistics on their way to the host."""

    names: tuple[str, ...]
    values: Tensor
    """(names,) float64 in host memory, valid once `ready` has passed."""

    ready: "torch.cuda.Event | None"

    def read(self) -> dict[str, float]:
        """The values. The one deliberate wait of a step, labelled in traces: for the device to end the step before."""
        if self.ready is not None:
            with torch.profiler.record_function(WAIT_LABEL):
                self.ready.synchronize()
        return dict(zip(self.names, self.values.tolist(), strict=True))


class MetricsAccumulator:
    """Sums and maxima of one step. Ranks must add the same names."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._sums: dict[str, Tensor | float] = {}
        self._maxes: dict[str, Tensor | float] = {}
        self._replicated: dict[str, Tensor | float] = {}

    def add_sum(self, name: str, value: Tensor | float) -> None:
        """A () tensor or a host number, to be added up over ranks."""
        self._sums[name] = value

    def add_max(self, name: str, value: Tensor | float) -> None:
        """A () tensor or a host number, of which the largest over ranks counts."""
        self._maxes[name] = value

    def add_replicated(self, name: str, value: Tensor) -> None:
        """A () tensor that is equal on every rank already."""
        self._replicated[name] = value

    def reduce(self) -> PendingMetrics:
        """Reduce over ranks and start the copy to the host. Does not wait."""
        sum_names, sums = self._vector(self._sums)
        max_names, maxes = self._vector(self._maxes)
        replicated_names, replicated = self._vector(self._replicated)
        values = torch.cat([self._mesh.sum_(sums), self._mesh.max_(maxes), replicated])
        ready = None
        if self._mesh.device.type == "cuda":
            host = torch.empty(values.shape, dtype=torch.float64, pin_memory=True)
            host.copy_(values, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            values = host
        return PendingMetrics(names=(*sum_names, *max_names, *replicated_names), values=values, ready=ready)

    def _vector(self, values: dict[str, Tensor | float]) -> tuple[list[str], Tensor]:
        """Names and (names,) float64 values on the device; host numbers travel together through pinned memory."""
        device = self._mesh.device
        on_device = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        on_host = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        numbers = torch.tensor(list(on_host.values()), dtype=torch.float64, pin_memory=device.type == "cuda")
        parts = [numbers.to(device, non_blocking=True)]
        if on_device:
            parts.append(torch.stack([value.to(device, torch.float64) for value in on_device.values()]))
        return [*on_host, *on_device], torch.cat(parts)
