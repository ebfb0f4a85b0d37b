"""Long curves made short enough to draw, with no peak or dip lost, and smoothed ones beside them."""

from collections.abc import Sequence

import numpy as np


def thin(values: np.ndarray, most: int) -> np.ndarray:
    """Which points of a curve to draw.

    The curve is cut into stretches of equally many points; of each its lowest and its highest point stay, of a stretch
    without a finite one its first, so that the gap shows. The first and the last point of the curve always stay.

    Args:
        values: (n,) float64.
        most: points to keep, at least 4; a curve that has no more is kept whole.

    Returns:
        (m,) int64, rising; m <= most.
    """
    count = len(values)
    if count <= most:
        return np.arange(count)
    stretches = (most - 2) // 2
    size = -(-count // stretches)
    padded = np.full(stretches * size, np.nan)
    padded[:count] = values
    rows = padded.reshape(stretches, size)
    starts = np.arange(stretches) * size
    lowest = np.where(np.isnan(rows), np.inf, rows).argmin(axis=1) + starts
    highest = np.where(np.isnan(rows), -np.inf, rows).argmax(axis=1) + starts
    kept = np.unique(np.concatenate([lowest, highest, [0, count - 1]]))
    return kept[kept < count]


def points_each(counts: Sequence[int], *, budget: int, most: int) -> int:
    """How many points every curve may have so that all together stay within a budget; short curves leave theirs to the
    long ones.

    Args:
        counts: points of each curve.
        budget: points of all curves together.
        most: upper bound for one curve.
    """
    low, high = 4, most
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(count, middle) for count in counts) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def smooth_span(count: int) -> float:
    """Points that the smooth form of a curve reaches back over: the root of their number. Short runs get enough of it
    and long ones do not lag behind."""
    return max(3.0, count**0.5)


def smooth(values: np.ndarray, span: float) -> np.ndarray:
    """Exponential mean of a curve, without the pull towards a first value (the bias correction of Adam, Kingma and Ba
    2015): the n-th value is the mean of the first n weighted by (1 - 1/span) ** age.

    Args:
        values: (n,) float64; what is not finite is passed over and stays NaN.
        span: points that the mean reaches back over, at least 1.
    """
    keep = 1 - 1 / span
    total = weight = 0.0
    out = np.full(len(values), np.nan)
    for i, value in enumerate(values.tolist()):
        if value == value:
            total = total * keep + value
            weight = weight * keep + 1
            out[i] = total / weight
    return out
