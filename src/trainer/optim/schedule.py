"""Learning rate as a pure function of the step index, so that resuming needs no state and cannot jump."""

import math

from configs.optim import ConstantSchedulerConfig, LinearSchedulerConfig, SchedulerConfig


def learning_rate(config: SchedulerConfig, *, peak: float, step: int, total_steps: int) -> float:
    """Learning rate of step `step` (from 0) of `total_steps`.

    Warm-up gives (step + 1) / warmup_steps of the peak, so no step is wasted at 0; the last step is at min_lr when the
    schedule decays; steps past the end stay there.
    """
    if isinstance(config, ConstantSchedulerConfig):
        return peak
    warmup_steps = _count(config.warmup_steps, total_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    # The peak itself always has its step: the last of the warm-up, or step 0 without one.
    decay_steps = total_steps - max(1, warmup_steps)
    shape = "cosine"
    if isinstance(config, LinearSchedulerConfig):
        decay_steps = min(decay_steps, _count(config.decay_steps, total_steps))
        shape = config.decay_shape
    steps_left = total_steps - 1 - step
    if steps_left >= decay_steps or decay_steps <= 0:
        return peak
    return config.min_lr + (peak - config.min_lr) * _remaining(shape, max(0, steps_left) / decay_steps)


def _count(steps: int | float, total_steps: int) -> int:
    """A count as it is; a fraction of the run rounded to whole steps."""
    return round(steps * total_steps) if 0 < steps < 1 else int(steps)


def _remaining(shape: str, left: float) -> float:
    """Share of the way from min_lr to the peak when `left` of the decay remains: 1 at its start, 0 at its end."""
    match shape:
        case "linear":
            return left
        case "cosine":
            return 0.5 * (1 - math.cos(math.pi * left))
        case "sqrt":
            # 1 - sqrt(progress): the decay that WSD runs use (Hägele et al., arXiv 2405.18392).
            return 1 - math.sqrt(1 - left)
        case _:
            raise ValueError(f"no decay shape {shape!r}")
