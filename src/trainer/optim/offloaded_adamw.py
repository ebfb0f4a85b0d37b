"""AdamW with its moments in host memory: each update brings them to the device piece by piece, and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.optim import AdamWConfig
from trainer.optim.adamw import MOMENTS, AdamWBase
from trainer.pinned import pinned_zeros

PIECE_ELEMENTS = 2**24
"""Elements updated at once: 64 MiB of each fp32 moment, long enough for the full speed of the bus."""

NUM_SLOTS = 3
"""Pieces on the device: one on its way in, one in work, one on its way out."""


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A range of one parameter, flattened."""

    name: str
    start: int
    stop: int


class _Slot:
    """Room on the device for the moments of one piece."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.moments = {kind: torch.empty(num_elements, dtype=dtype, device=device) for kind in MOMENTS}
        self.is_free: torch.cuda.Event | None = None
        """The piece before has been copied back."""


class OffloadedAdamW(AdamWBase):
    """The same update as AdamW's, bit for bit: the same kernel, on parts of the parameters.

    Copies to the device, updates and copies back run on three streams at once. The host waits only where it reads the
    moments itself (`moments`).
    """

    def __init__(
        self,
        config: AdamWConfig,
        masters: dict[str, Tensor],
        num_dims: dict[str, int],
        *,
        piece_elements: int = PIECE_ELEMENTS,
    ) -> None:
        """
        Args:
            masters, num_dims: as in AdamW; all masters on one device and of one dtype.
            piece_elements: elements updated at once.
        """
        super().__init__(config, masters, num_dims)
        first = next(iter(masters.values()))
        self._config, self._device = config, first.device
        self._is_cuda = first.device.type == "cuda"
        self._moments = {
            kind: {
                name: pinned_zeros(master.shape, master.dtype, pin=self._is_cuda) for name, master in masters.items()
            }
            for kind in MOMENTS
        }
        self._steps = {name: torch.zeros((), dtype=torch.float32, device=self._device) for name in masters}
        self._pieces = [
            _Piece(name=name, start=start, stop=min(start + piece_elements, master.numel()))
            for name, master in masters.items()
            for start in range(0, master.numel(), piece_elements)
        ]
        largest = max((piece.stop - piece.start for piece in self._pieces), default=0)
        self._slots = [_Slot(largest, first.dtype, self._device) for _ in range(min(NUM_SLOTS, len(self._pieces)))]
        self._in, self._out = (torch.cuda.Stream(self._device) if self._is_cuda else None for _ in range(2))

    def reset(self) -> None:
        """Empty moments."""
        self._wait()
        for tensors in (*self._moments.values(), self._steps):
            for tensor in tensors.values():
                tensor.zero_()

    def step(self, gradients: dict[str, Tensor], lr: float, update_ok: Tensor) -> None:
        """As AdamW's. Returns when all of it is enqueued."""
        steps = list(self._steps.values())
        found_inf = (~update_ok).to(torch.float32)
        torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
        if self._in is not None and self._out is not None:
            self._in.wait_stream(self._out)  # what the step before copied back is there
        for index, piece in enumerate(self._pieces):
            self._update(piece, self._slots[index % len(self._slots)], gradients[piece.name], lr, found_inf)
        # The kernel left everything as it was; so are the counts.
        torch._foreach_sub_(steps, [found_inf] * len(steps))  # pyright: ignore[reportPrivateImportUsage]

    def _update(self, piece: _Piece, slot: _Slot, gradient: Tensor, lr: float, found_inf: Tensor) -> None:
        config, count = self._config, piece.stop - piece.start
        part = slice(piece.start, piece.stop)
        on_device = {kind: room[:count] for kind, room in slot.moments.items()}
        on_host = {kind: self._moments[kind][piece.name].view(-1)[part] for kind in MOMENTS}
        with self._on(self._in, after=slot.is_free):
            for kind in MOMENTS:
                on_device[kind].copy_(on_host[kind], non_blocking=True)
        self._order(self._in, None)
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            [self._masters[piece.name].view(-1)[part]],
            [gradient.reshape(-1)[part].to(self._masters[piece.name].dtype)],
            [on_device["exp_avg"]],
            [on_device["exp_avg_sq"]],
            [],
            [self._steps[piece.name]],
            lr=lr,
            beta1=config.betas[0],
            beta2=config.betas[1],
            weight_decay=self._decay[piece.name],
            eps=config.eps,
            amsgrad=False,
            maximize=False,
            found_inf=found_inf,
        )
        self._order(None, self._out)
        with self._on(self._out):
            for kind in MOMENTS:
                on_host[kind].copy_(on_device[kind], non_blocking=True)
            if self._out is not None:
                slot.is_free = torch.cuda.Event()
                slot.is_free.record(self._out)

    @contextmanager
    def _on(self, stream: "torch.cuda.Stream | None", after: "torch.cuda.Event | None" = None) -> Iterator[None]:
        """Enqueue on `stream`, after an event; plainly where there are no streams."""
        if stream is None:
            yield
            return
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield

    def _order(self, first: "torch.cuda.Stream | None", then: "torch.cuda.Stream | None") -> None:
        """What is enqueued on `then` from here on waits for what was on `first`; None is the stream of the step."""
        if self._is_cuda:
            current = torch.cuda.current_stream(self._device)
            (then or current).wait_stream(first or current)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Moments by kind and parameter name, on the host. Waits for the copies under way: a deliberate host sync."""
        self._wait()
        return self._moments

    def step_counts(self) -> dict[str, Tensor]:
        """() float32 number of updates of each parameter, by name, on the masters' device."""
        return self._steps

    def _wait(self) -> None:
        if self._out is not None:
            self._out.synchronize()
