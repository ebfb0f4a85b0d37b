import math
from itertools import pairwise

import pytest

from configs.optim import ConstantSchedulerConfig, CosineSchedulerConfig, LinearSchedulerConfig
from trainer.optim.schedule import learning_rate


def rates(config, total_steps: int, peak: float = 1.0, steps: int | None = None) -> list[float]:
    return [
        learning_rate(config, peak=peak, step=step, total_steps=total_steps) for step in range(steps or total_steps)
    ]


def test_warmup_stable_decay():
    """Field case R76: the first step already has a share of the peak, and the last one is at min_lr."""
    config = LinearSchedulerConfig(warmup_steps=4, decay_steps=4)
    assert rates(config, 10) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_no_warmup_starts_at_the_peak():
    """Field case R77."""
    for config in (
        LinearSchedulerConfig(decay_steps=2, min_lr=0.1),
        CosineSchedulerConfig(min_lr=0.1),
        ConstantSchedulerConfig(),
    ):
        assert rates(config, 10)[0] == 1.0


@pytest.mark.parametrize(
    "config",
    [
        LinearSchedulerConfig(warmup_steps=0, decay_steps=0),
        LinearSchedulerConfig(warmup_steps=10, decay_steps=0),
        LinearSchedulerConfig(warmup_steps=0.01, decay_steps=0.01),
        CosineSchedulerConfig(warmup_steps=10),
        CosineSchedulerConfig(warmup_steps=9),
        LinearSchedulerConfig(warmup_steps=5, decay_steps=5, min_lr=0.2),
    ],
)
def test_degenerate_phases_are_finite(config):
    """Field case R75: no warm-up, no decay, warm-up as long as the run, fractions that round to nothing."""
    values = rates(config, 10)
    assert all(math.isfinite(value) and 0 <= value <= 1 for value in values)
    assert max(values) == 1.0


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_decay_ends_at_min_lr_and_stays(shape):
    config = LinearSchedulerConfig(warmup_steps=0.1, decay_steps=0.5, decay_shape=shape, min_lr=0.125)
    values = rates(config, 20, steps=25)
    assert values[19:] == [0.125] * 6
    assert values[9] == 1.0 > values[10] > values[11]
    assert all(a >= b for a, b in pairwise(values[2:]))


def test_sqrt_shape_falls_fastest_at_first():
    config = LinearSchedulerConfig(decay_steps=4, decay_shape="sqrt")
    falling = [1 - math.sqrt(0.25), 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0]
    assert rates(config, 5) == pytest.approx([1.0, *falling])


def test_cosine_is_half_way_in_the_middle():
    config = CosineSchedulerConfig(warmup_steps=2, min_lr=0.2)
    values = rates(config, 12)
    assert values[:2] == [0.5, 1.0]
    assert values[6] == pytest.approx(0.6)
    assert values[-1] == 0.2


def test_fraction_equals_count():
    assert rates(LinearSchedulerConfig(warmup_steps=0.2, decay_steps=0.3), 50) == rates(
        LinearSchedulerConfig(warmup_steps=10, decay_steps=15), 50
    )
