"""AdamW on the local parts of the master weights."""

import torch
from torch import Tensor

from configs.optim import AdamWConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """torch's fused AdamW (Loshchilov & Hutter, arXiv 1711.05101), with a skip decided on the device.

    Weight decay acts on matrices and embeddings only; norms, biases and other 1-D parameters have none.
    """

    def __init__(self, config: AdamWConfig, masters: dict[str, Tensor], num_dims: dict[str, int]) -> None:
        """
        Args:
            masters: local tensors by canonical name.
            num_dims: dimensions of each whole parameter (a rank's empty part may look different).
        """
        self._masters = masters
        decayed = [master for name, master in masters.items() if num_dims[name] >= 2]
        plain = [master for name, master in masters.items() if num_dims[name] < 2]
        groups = [(decayed, config.weight_decay), (plain, 0.0)]
        self._optimizer = torch.optim.AdamW(
            [{"params": tensors, "weight_decay": decay} for tensors, decay in groups if tensors],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
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
        """Update the masters in place; where `update_ok` is False nothing changes, Adam's step count included.

        Args:
            gradients: local tensors by name, in the masters' dtype.
            update_ok: () bool on the device.
        """
        for name, master in self._masters.items():
            master.grad = gradients[name]
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        # The attribute through which torch's own gradient scaler tells a fused optimizer to leave a step out.
        self._optimizer.found_inf = (~update_ok).to(torch.float32)  # pyright: ignore[reportAttributeAccessIssue]
        self._optimizer.step()
        for master in self._masters.values():
            master.grad = None

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Moments by kind and parameter name, laid out like the masters."""
        return {
            kind: {name: self._optimizer.state[master][kind] for name, master in self._masters.items()}
            for kind in MOMENTS
        }

    def step_counts(self) -> dict[str, Tensor]:
        """() float32 number of updates of each parameter, by name; the same on every rank."""
        return {name: self._optimizer.state[master]["step"] for name, master in self._masters.items()}

    def decay_table(self) -> str:
        """One line for the log: how many parameters decay and how many do not."""
        parts = [
            f"{len(group['params'])} tensors with weight decay {group['weight_decay']:g}"
            for group in self._optimizer.param_groups
        ]
        return ", ".join(parts)
