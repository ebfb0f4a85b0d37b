"""The interface that training code knows of a model."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

from models.batch import Batch


class LossOutput(NamedTuple):
    """What `CausalLM.forward` returns. A tuple, because FSDP looks for tensors in outputs and knows no dataclasses."""

    loss: Tensor
    """() sum of `nats` times the loss scale; call backward() on it."""

    nats: Tensor
    """(rows, seq_len) fp32 (fp64 in float64 runs): -ln p(label); 0 where the label is IGNORE_INDEX. Detached."""

    greedy_hits: Tensor | None
    """(rows, seq_len) bool: the most likely token is the label; False where there is none. None unless asked for."""


class InitRule(Protocol):
    """A family's own rule for one parameter's first values."""

    def __call__(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """`count` float32 values of consecutive elements of the parameter (row-major)."""
        ...


class CausalLM(nn.Module):
    """A decoder with its loss. Families derive from it; training code uses nothing else.

    The head owns the loss because FSDP's hooks gather its weight, and because the logits of a whole batch must never
    exist at once.
    """

    def forward(self, batch: Batch, loss_scale: Tensor | None = None, greedy: bool = False) -> LossOutput:
        """Loss of one micro-batch.

        Args:
            batch: the rows.
            loss_scale: () on the batch's device, normally 1 / loss tokens of the global batch; None is 1.
            greedy: also say where the most likely token is the label.
        """
        raise NotImplementedError

    def logits(self, batch: Batch) -> Tensor:
        """(rows, seq_len, vocab_size) logits in fp32 (fp64 in float64 runs). For generation and tests: holds them all."""
        raise NotImplementedError

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """The transformer blocks: units of compile, activation checkpointing and sharding."""
        raise NotImplementedError

    def init_rules(self) -> dict[str, InitRule]:
        """Parameters (by canonical name) with a rule of their own. The others: see models.init."""
        return {}
