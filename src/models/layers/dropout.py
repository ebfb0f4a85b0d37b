"""Dropout whose masks follow from numbers that the host gives before each forward pass.

No random state is read, kept or stored: a mask depends on the key of its layer alone, so a repeated or resumed run
draws the same ones, and so does the recomputation of activation checkpointing. The draw is one operator that compiled
graphs call as it is; its key is an input of the graph, so a new one compiles nothing anew. Reading the key does not
wait for a GPU: it lies in host memory.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor, nn

_NO_KEY = -1


class DropoutKeys:
    """The keys of all dropout layers of a model."""

    def __init__(self, count: int, *, seed: int) -> None:
        """
        Args:
            count: layers.
            seed: of all masks.
        """
        self._seed = seed
        self._keys = torch.full((count,), _NO_KEY, dtype=torch.int64, device="cpu")

    def layers(self, p: float) -> list["SeededDropout"]:
        """One layer for each key, which zeroes elements with probability `p`."""
        return [SeededDropout(p, key) for key in self._keys.unbind()]

    def draw(self, *place: int) -> None:
        """Set all keys for the forward and backward pass about to run.

        Args:
            place: what tells it from all others, such as step, rank and micro-batch.
        """
        text = "/".join(str(number) for number in (self._seed, *place))
        key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
        numbers = np.random.Generator(np.random.Philox(key=key)).integers(0, 2**63, self._keys.numel(), np.int64)
        self._keys.copy_(torch.from_numpy(numbers))


class SeededDropout(nn.Module):
    """Sets elements to 0 with probability `p` and scales the others by 1 / (1 - p), in training.

    Without gradients (validation) nothing is set to 0, whatever the mode of the module.
    """

    def __init__(self, p: float, key: Tensor) -> None:
        """
        Args:
            p: at least 0 and below 1.
            key: () int64 in host memory, at least 0 when a training forward pass runs.
        """
        super().__init__()
        self.p = p
        # No buffer: it stays on the host wherever the module goes.
        self.key = key

    def forward(self, hidden: Tensor) -> Tensor:
        """Any shape -> the same, same dtype."""
        if not (self.training and torch.is_grad_enabled()):
            return hidden
        kept = _kept(hidden, self.key, 1 - self.p)
        return hidden * kept * (1 / (1 - self.p))


@torch.library.custom_op("oneloop::dropout_kept", mutates_args=())
def _kept(like: Tensor, key: Tensor, share: float) -> Tensor:
    """Which elements stay: bool, shape and device of `like`, True with probability `share`. Elements of equal key,
    shape and kind of device are equal."""
    seed = int(key)
    if seed == _NO_KEY:
        raise RuntimeError("dropout in a training forward pass before DropoutKeys.draw")
    generator = torch.Generator(device=like.device).manual_seed(seed)
    return torch.empty(like.shape, dtype=torch.bool, device=like.device).bernoulli_(share, generator=generator)


@_kept.register_fake
def _(like: Tensor, key: Tensor, share: float) -> Tensor:
    return torch.empty(like.shape, dtype=torch.bool, device=like.device)
