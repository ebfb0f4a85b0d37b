import gc

import pytest
import torch

from configs.optim import AdamWConfig
from trainer.optim.build import build_optimizer

YES, NO = torch.tensor(True), torch.tensor(False)


def build(masters, **config):
    return build_optimizer(AdamWConfig(**config), masters, {name: master.dim() for name, master in masters.items()})


def test_decay_is_for_matrices_only():
    """Field case R80: zero gradients, one step: norms, biases and other 1-D parameters keep every bit."""
    masters = {
        "proj.weight": torch.ones(4, 4),
        "norm.weight": torch.full((4,), 1.5),
        "proj.bias": torch.full((4,), 0.3),
    }
    before = {name: master.clone() for name, master in masters.items()}
    optimizer = build(masters, weight_decay=0.1)
    optimizer.step({name: torch.zeros_like(master) for name, master in masters.items()}, 0.5, YES)
    assert torch.equal(masters["norm.weight"], before["norm.weight"])
    assert torch.equal(masters["proj.bias"], before["proj.bias"])
    assert torch.allclose(masters["proj.weight"], torch.full((4, 4), 1 - 0.5 * 0.1))
    assert optimizer.decay_table() == "1 tensors with weight decay 0.1, 2 tensors with weight decay 0"


def test_masters_and_moments_keep_small_updates():
    """Field case R83: fp32 state; 100 updates of 1e-4 move a weight of 1.0 by 1e-2."""
    masters = {"w": torch.ones(2, 2)}
    optimizer = build(masters, weight_decay=0.0, betas=(0.0, 0.0), eps=1e-12)
    for _ in range(100):
        optimizer.step({"w": torch.ones(2, 2)}, 1e-4, YES)
    assert all(m["w"].dtype == torch.float32 for m in optimizer.moments().values())
    assert masters["w"].dtype == torch.float32
    assert torch.allclose(masters["w"], torch.full((2, 2), 1 - 1e-2), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_skipped_step_changes_nothing(dtype):
    """Field case R94: an infinite gradient leaves weights, moments and Adam's step count as they were."""
    torch.manual_seed(0)
    masters = {"w": torch.randn(3, 3, dtype=dtype), "b": torch.randn(3, dtype=dtype)}
    optimizer = build(masters)
    optimizer.step({name: torch.randn_like(master) for name, master in masters.items()}, 1e-2, YES)
    kept = {name: master.clone() for name, master in masters.items()}
    moments = {kind: {n: m.clone() for n, m in by_name.items()} for kind, by_name in optimizer.moments().items()}
    optimizer.step({name: torch.full_like(master, float("inf")) for name, master in masters.items()}, 1e-2, NO)
    for name, master in masters.items():
        assert torch.equal(master, kept[name])
        assert optimizer.step_counts()[name].item() == 1.0
        for kind, by_name in moments.items():
            assert torch.equal(optimizer.moments()[kind][name], by_name[name])
    optimizer.step({name: torch.ones_like(master) for name, master in masters.items()}, 1e-2, YES)
    assert optimizer.step_counts()["w"].item() == 2.0
    assert not torch.equal(masters["w"], kept["w"])


def test_matches_torch_adamw():
    torch.manual_seed(0)
    start, gradient = torch.randn(4, 4), torch.randn(4, 4)
    masters = {"w": start.clone()}
    optimizer = build(masters, lr=1e-2, weight_decay=0.2, eps=1e-6)
    reference = torch.nn.Parameter(start.clone())
    plain = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.2, foreach=False)
    for step in range(5):
        reference.grad = gradient * step
        plain.step()
        optimizer.step({"w": gradient * step}, 1e-2, YES)
    assert torch.allclose(masters["w"], reference.detach(), atol=1e-7)


def test_many_steps_leave_nothing_behind():
    """Field case R82: 500 fused steps: the number of live objects stays, and the weights are those of foreach."""
    torch.manual_seed(0)
    masters = {"w": torch.randn(5, 3), "b": torch.randn(3)}
    gradients = [{name: torch.randn_like(master) for name, master in masters.items()} for _ in range(10)]
    plain = [torch.nn.Parameter(master.clone()) for master in masters.values()]
    groups = [{"params": [plain[0]], "weight_decay": 0.1}, {"params": [plain[1]], "weight_decay": 0.0}]
    foreach = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, foreach=True)
    optimizer = build(masters, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    counts = []
    for step in range(500):
        optimizer.step(gradients[step % 10], 1e-3, YES)
        for parameter, gradient in zip(plain, gradients[step % 10].values(), strict=True):
            parameter.grad = gradient
        foreach.step()
        if step in (50, 499):
            gc.collect()
            counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert counts[0] == counts[1]
    for master, parameter in zip(masters.values(), plain, strict=True):
        assert torch.allclose(master, parameter.detach(), rtol=0, atol=1e-6)
