"""Global gradient norm, per-group norms, clipping, and the device's own decision whether the step may update."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.parallel.mesh import Mesh

GROUPS = ("embedding", "attention", "mlp", "norm", "head", "other")


def parameter_group(name: str) -> str:
    """Group of a parameter in `optim/grad_norm/<group>`, by the field's usual names for modules."""
    parts = name.split(".")
    if any("norm" in part for part in parts):
        return "norm"
    for part in parts:
        if part.startswith("embed"):
            return "embedding"
        if part.endswith("attn") or part == "attention":
            return "attention"
        if part == "mlp":
            return "mlp"
        if part == "lm_head":
            return "head"
    return "other"


@dataclass(frozen=True, kw_only=True)
class GradientNorms:
    """All on the device, equal on every rank."""

    total: Tensor
    """() float64: norm of the whole gradient, before clipping."""

    groups: dict[str, Tensor]
    """() float64 norm of each group of parameters that exists."""

    update_ok: Tensor
    """() bool: loss and norm are finite and there was a loss token."""


def gradient_norms(gradients: dict[str, Tensor], nats: Tensor, loss_tokens: Tensor, mesh: Mesh) -> GradientNorms:
    """Norms over all ranks, in one all-reduce that carries the loss's finiteness too.

    Args:
        gradients: this rank's parts by parameter name.
        nats: () float64 loss of this rank.
        loss_tokens: () float64 of the global batch.
    """
    members: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        members.setdefault(parameter_group(name), []).append(gradient)
    names = [group for group in GROUPS if group in members]
    norms = [_norm(members[group]) for group in names]
    # Gradients in host memory (model.fsdp_cpu_offload) have their norms there.
    sums = torch.stack([norm.square().to(nats.device) for norm in norms] + [nats])
    sums[:-1] /= mesh.dp_replicate  # each replica adds the same
    mesh.sum_(sums)
    squares = sums[:-1]
    total = squares.sum().sqrt()
    return GradientNorms(
        total=total,
        groups=dict(zip(names, squares.sqrt().unbind(), strict=True)),
        update_ok=torch.isfinite(total) & torch.isfinite(sums[-1]) & (loss_tokens > 0),
    )


def _norm(tensors: list[Tensor]) -> Tensor:
    """() float64 norm of all elements."""
    if tensors[0].device.type == "cpu":
        # The CPU adds fp32 squares one by one: off by 2e-4 at ten million elements. CUDA adds them in trees.
        parts = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
        return torch.linalg.vector_norm(torch.stack(parts))
    if tensors[0].dtype == torch.bfloat16:  # its norms would have 8 bits too
        parts = torch._foreach_norm(tensors, 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        return torch.linalg.vector_norm(torch.stack(parts)).double()
    return torch.nn.utils.get_total_norm(tensors, foreach=True).double()


def clip_gradients(gradients: dict[str, Tensor], total_norm: Tensor, max_norm: float) -> None:
    """Scale gradients down, in place, to a global norm of at most `max_norm`.

    Args:
        total_norm: () float64.
    """
    scale = (max_norm / total_norm.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients.values():
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), tensors in alike.items():
        if dtype == torch.bfloat16:
            # Rounded to 8 bits, the scale would be off by up to 1/512 in one direction for all of them.
            for gradient in tensors:
                gradient.mul_(scale.to(device, torch.float32))
            continue
        torch._foreach_mul_(tensors, scale.to(device, dtype))  # pyright: ignore[reportPrivateImportUsage]
