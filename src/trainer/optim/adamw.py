"""AdamW on the local parts of the master weights."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from configs.optim import AdamWConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamWBase(ABC):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) by torch's fused kernel, with a skip decided on the device.

    Weight decay acts on matrices and embeddings only; norms, biases and other 1-D parameters have none.
    """

    def __init__(self, config: AdamWConfig, masters: dict[str, Tensor], num_dims: dict[str, int]) -> None:
        """
        Args:
            masters: local tensors by canonical name.
            num_dims: dimensions of each whole parameter (a rank's empty part may look different).
        """
        self._masters = masters
        self._decay = {name: config.weight_decay if num_dims[name] >= 2 else 0.0 for name in masters}

    @abstractmethod
    def reset(self) -> None:
        """Empty moments."""

    @abstractmethod
    def step(self, gradients: dict[str, Tensor], lr: float, update_ok: Tensor) -> None:
        """Update the masters in place; where `update_ok` is False nothing changes, Adam's step count included.

        Args:
            gradients: local tensors by name. Of another dtype than the masters they are rounded to theirs.
            update_ok: () bool on the device.
        """

    @abstractmethod
    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Moments by kind and parameter name, laid out like the masters."""

    @abstractmethod
    def step_counts(self) -> dict[str, Tensor]:
        """() float32 number of updates of each parameter, by name; the same on every rank."""

    def decay_table(self) -> str:
        """One line for the log: how many parameters decay and how many do not."""
        matrices = [decay for decay in self._decay.values() if decay]
        parts = [(len(matrices), matrices[0])] if matrices else []
        parts.append((len(self._decay) - len(matrices), 0.0))
        return ", ".join(f"{count} tensors with weight decay {decay:g}" for count, decay in parts if count)


class AdamW(AdamWBase):
    """With its moments where the masters are."""

    def __init__(self, config: AdamWConfig, masters: dict[str, Tensor], num_dims: dict[str, int]) -> None:
        """As AdamWBase."""
        super().__init__(config, masters, num_dims)
        groups = [
            {
                "params": [master for name, master in masters.items() if self._decay[name] == decay],
                "weight_decay": decay,
            }
            for decay in sorted(set(self._decay.values()), reverse=True)
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        self.reset()

    def reset(self) -> None:
        """Empty moments. Made here and not at the first step, so that a checkpoint can be loaded into them."""
        for master in self._masters.values():
            self._optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def step(self, gradients: dict[str, Tensor], lr: float, update_ok: Tensor) -> None:
        """See AdamWBase."""
        for name, master in self._masters.items():
            master.grad = gradients[name].to(master.dtype)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        # The attribute through which torch's own gradient scaler tells a fused optimizer to leave a step out. Masters
        # in host memory (model.fsdp_cpu_offload) are updated there, which waits for the device.
        found_inf = (~update_ok).to(next(iter(self._masters.values())).device, torch.float32)
        self._optimizer.found_inf = found_inf  # pyright: ignore[reportAttributeAccessIssue]
        self._optimizer.step()
        for master in self._masters.values():
            master.grad = None

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """See AdamWBase."""
        return {
            kind: {name: self._optimizer.state[master][kind] for name, master in self._masters.items()}
            for kind in MOMENTS
        }

    def step_counts(self) -> dict[str, Tensor]:
        """See AdamWBase."""
        return {name: self._optimizer.state[master]["step"] for name, master in self._masters.items()}
