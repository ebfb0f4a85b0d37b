"""AdamW with its moments in host memory: the numbers of AdamW, piece by piece."""

import pytest
import torch

from configs.optim import AdamWConfig
from trainer.optim.adamw import AdamW
from trainer.optim.offloaded_adamw import OffloadedAdamW

SHAPES = {"matrix": (37, 5), "norm": (11,), "empty": (0, 4), "exact": (4, 8)}


def parameters(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_equal_those_of_adamw_bit_for_bit(dtype):
    """Pieces of 16 elements, some smaller, over five updates of which the third is left out; gradients in float32."""
    config = AdamWConfig(weight_decay=0.3, betas=(0.8, 0.9))
    dims = {name: len(shape) for name, shape in SHAPES.items()}
    expected, found = parameters(dtype), parameters(dtype)
    plain = AdamW(config, expected, dims)
    offloaded = OffloadedAdamW(config, found, dims, piece_elements=16)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        gradients = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        for optimizer in (plain, offloaded):
            optimizer.step({k: v.clone() for k, v in gradients.items()}, 1e-2 * (step + 1), torch.tensor(step != 2))
    for name in SHAPES:
        assert torch.equal(expected[name], found[name]), name
        assert plain.step_counts()[name].item() == offloaded.step_counts()[name].item() == 4
        for kind, moments in offloaded.moments().items():
            assert torch.equal(plain.moments()[kind][name], moments[name]), (kind, name)
            assert moments[name].dtype == dtype
    assert (
        plain.decay_table()
        == offloaded.decay_table()
        == "3 tensors with weight decay 0.3, 1 tensors with weight decay 0"
    )


def test_reset_empties_the_moments_in_place():
    """A checkpoint is loaded into what `moments` gave before."""
    masters = parameters(torch.float32)
    optimizer = OffloadedAdamW(AdamWConfig(), masters, dict.fromkeys(SHAPES, 2))
    moments = optimizer.moments()
    optimizer.step({name: torch.ones_like(master) for name, master in masters.items()}, 0.1, torch.tensor(True))
    assert moments["exp_avg"]["norm"][0] == pytest.approx(0.1)
    optimizer.reset()
    assert not moments["exp_avg"]["norm"].any()
    assert optimizer.step_counts()["norm"].item() == 0
