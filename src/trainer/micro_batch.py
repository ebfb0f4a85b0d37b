"""The micro-batches of one optimizer step: the only place that calls backward.

The gradient is that of the mean over all loss tokens of the global batch, whatever the split into micro-batches and
ranks: the total is summed over ranks before the first forward pass and stays on the device, every micro-batch's loss
is scaled by its inverse, and gradients are plain sums. Nothing here waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.base import CausalLM
from models.batch import Batch
from trainer.parallel.data_parallel import GradSync
from trainer.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What the forward and backward passes of a step leave on the device, besides the gradients in `GradSync`."""

    nats: Tensor
    """() float64: this rank's sum of -ln p over its loss tokens."""

    loss_tokens: Tensor
    """() float64: loss tokens of the global batch."""


def run_micro_batches(
    model: CausalLM,
    micro_batches: Sequence[Batch],
    num_loss_tokens: int,
    grad_sync: GradSync,
    mesh: Mesh,
    *,
    step: int = 0,
) -> StepResult:
    """Forward and backward of this rank's part of a global batch.

    Args:
        micro_batches: host batches, pinned on CUDA, the same number on every rank.
        num_loss_tokens: loss tokens in them.
        step: index of the step; only dropout asks for it.
    """
    # A fill kernel: torch.tensor(n, device=...) would copy from pageable memory and wait.
    counted = num_loss_tokens if mesh.counts_rows else 0
    loss_tokens = torch.full((), counted, dtype=torch.float64, device=mesh.device)
    mesh.sum_(loss_tokens)
    loss_scale = 1 / loss_tokens.clamp(min=1)
    nats = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for index, batch in enumerate(micro_batches):
        grad_sync.before_backward(is_last=index == len(micro_batches) - 1)
        if model.dropout is not None:
            model.dropout.draw(step, mesh.rank, index)
        output = model(batch.to(mesh.device), loss_scale)
        output.loss.backward()
        nats += output.nats.sum(dtype=torch.float64)
    return StepResult(nats=nats, loss_tokens=loss_tokens)
