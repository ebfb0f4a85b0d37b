"""The samples of an epoch, drawn from those of the parts by `data.probabilities`.

Part after part is drawn, each draw for itself with the given probabilities, and gives its next sample, starting over
after its last. The epoch ends with the draw by which the first part (`first_exhausted`), or by which every part
(`all_exhausted`), has given as many samples as it has. This is the rule of `datasets.interleave_datasets`; the draws
are other ones.

So under `first_exhausted` no sample comes twice and the first part to end is there in full; under `all_exhausted`
every sample comes at least once, and the samples of a part come equally often, give or take one.
"""

from collections.abc import Sequence

import numpy as np

from configs.data import StoppingStrategy
from configs.errors import ConfigError
from trainer.data.permutation import derive_int

_KEY = "data.probabilities"
_LONGEST = 1 << 30
"""Samples of an epoch: more are a mistake in the probabilities, and do not fit into memory."""


def mix(
    sizes: Sequence[int],
    *,
    probabilities: Sequence[float],
    stopping_strategy: StoppingStrategy,
    seed: int,
) -> np.ndarray:
    """The samples of an epoch in the order of the mixture.

    Args:
        sizes: samples per part.
        probabilities: share of each part, positive, summing to 1.
        seed: the draws depend on it alone.

    Returns:
        (n, 2) int64: part, sample of the part.

    Raises:
        ConfigError: a part to draw from has no sample, or an epoch would never end.
    """
    _check(sizes, probabilities, stopping_strategy)
    parts, places = _draw(np.asarray(sizes), np.asarray(probabilities, np.float64), stopping_strategy, seed)
    mixed = np.empty((len(parts), 2), np.int64)
    mixed[:, 0] = parts
    for part, size in enumerate(sizes):
        mixed[places[part], 1] = np.arange(len(places[part])) % size
    return mixed


def _check(sizes: Sequence[int], probabilities: Sequence[float], stopping_strategy: str) -> None:
    for number, size in enumerate(sizes, start=1):
        if size == 0:
            raise ConfigError.one(_KEY, f"part {number} of the data has no sample to draw; leave that part out")
    lengths = [size / probability for size, probability in zip(sizes, probabilities, strict=True)]
    longest = max(lengths) if stopping_strategy == "all_exhausted" else min(lengths)
    if longest > _LONGEST:
        part = lengths.index(longest)
        raise ConfigError.one(
            _KEY,
            f"{probabilities[part]} is too small: an epoch with all {sizes[part]:,} samples of part {part + 1} would "
            f"have about {longest:.1e} samples",
        )


def _draw(
    sizes: np.ndarray, probabilities: np.ndarray, stopping_strategy: str, seed: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Drawn parts up to the end of the epoch, (n,) int32, and the places of each part among them."""
    generator = np.random.Generator(np.random.Philox(key=derive_int("mixture", seed)))
    bounds = np.cumsum(probabilities)
    bounds /= bounds[-1]
    reached = all if stopping_strategy == "all_exhausted" else any
    counts = np.zeros(len(sizes), np.int64)
    drawn = []
    while not reached(counts >= sizes):
        # About as many as are still missing. How many are drawn at once changes nothing of what is drawn.
        missing = np.maximum(sizes - counts, 0) / probabilities
        size = int(missing.max() if stopping_strategy == "all_exhausted" else missing.min())
        # Rounding may put a number at the very end beyond the last bound.
        block = np.searchsorted(bounds[:-1], generator.random(size + 1000), side="right").astype(np.int32)
        counts += np.bincount(block, minlength=len(sizes))
        drawn.append(block)
    parts = np.concatenate(drawn)
    places = [np.flatnonzero(parts == part) for part in range(len(sizes))]
    # The place of the draw by which a part has given all of its samples.
    ends = [int(found[size - 1]) for found, size in zip(places, sizes.tolist(), strict=True) if len(found) >= size]
    stop = (max(ends) if stopping_strategy == "all_exhausted" else min(ends)) + 1
    return parts[:stop], [found[: np.searchsorted(found, stop)] for found in places]
