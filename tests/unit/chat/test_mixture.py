"""The order of samples of several parts: datasets.interleave_datasets is the oracle of its rule."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from trainer.data.chat.mixture import mix


def interleaved(parts: list[int], sizes: list[int], stopping_strategy: str) -> list[list[int]]:
    """The rule one draw at a time: the samples that these draws give, up to the end of the epoch."""
    counts = [0] * len(sizes)
    samples = []
    for part in parts:
        samples.append([part, counts[part] % sizes[part]])
        counts[part] += 1
        done = [count >= size for count, size in zip(counts, sizes, strict=True)]
        if all(done) if stopping_strategy == "all_exhausted" else any(done):
            return samples
    raise AssertionError("the epoch does not end with these draws")


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=4),
    st.sampled_from(["first_exhausted", "all_exhausted"]),
    st.integers(0, 2**40),
)
def test_the_rule_draw_by_draw(parts: list[tuple[int, int]], stopping_strategy: str, seed: int):
    sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
    probabilities = [weight / sum(weights) for weight in weights]
    mixed = mix(sizes, probabilities=probabilities, stopping_strategy=stopping_strategy, seed=seed)
    # The whole of it: the last draw is the one that ends the epoch.
    assert mixed.tolist() == interleaved(mixed[:, 0].tolist(), sizes, stopping_strategy)
    again = mix(sizes, probabilities=probabilities, stopping_strategy=stopping_strategy, seed=seed)
    assert np.array_equal(mixed, again)


@pytest.mark.parametrize("stopping_strategy", ["first_exhausted", "all_exhausted"])
def test_what_datasets_gives_follows_the_same_rule(stopping_strategy: str):
    """The oracle of the oracle, and the shares and lengths of both."""
    from datasets import Dataset, interleave_datasets

    sizes, probabilities = [40, 90, 25], [0.2, 0.5, 0.3]
    tables = [
        Dataset.from_dict({"part": [part] * size, "sample": list(range(size))}) for part, size in enumerate(sizes)
    ]
    lengths: dict[str, list[int]] = {"theirs": [], "ours": []}
    for seed in range(10):
        table = interleave_datasets(tables, probabilities=probabilities, seed=seed, stopping_strategy=stopping_strategy)
        theirs = [list(pair) for pair in zip(table["part"], table["sample"], strict=True)]
        assert theirs == interleaved([part for part, _ in theirs], sizes, stopping_strategy)
        lengths["theirs"].append(len(theirs))
        ours = mix(sizes, probabilities=probabilities, stopping_strategy=stopping_strategy, seed=seed)
        lengths["ours"].append(len(ours))
    assert np.mean(lengths["ours"]) == pytest.approx(np.mean(lengths["theirs"]), rel=0.2)


def test_shares_and_coverage():
    sizes, probabilities = [1000, 30_000, 500], [0.1, 0.7, 0.2]
    mixed = mix(sizes, probabilities=probabilities, stopping_strategy="all_exhausted", seed=3)
    counts = [np.bincount(mixed[mixed[:, 0] == part, 1], minlength=size) for part, size in enumerate(sizes)]
    shares = np.array([count.sum() for count in counts]) / len(mixed)
    assert shares == pytest.approx(probabilities, abs=0.01)
    assert all(count.min() >= 1 and count.max() - count.min() <= 1 for count in counts)
    short = mix(sizes, probabilities=probabilities, stopping_strategy="first_exhausted", seed=3)
    assert len(np.unique(short, axis=0)) == len(short) < 3000
    assert (np.bincount(short[:, 0], minlength=3) == sizes).sum() == 1


def test_seeds_differ_and_nothing_else_does():
    def draws(seed: int, sizes: tuple[int, int] = (5000, 5000)) -> list[int]:
        mixed = mix(sizes, probabilities=[0.5, 0.5], stopping_strategy="first_exhausted", seed=seed)
        return mixed[:1000, 0].tolist()

    assert len({tuple(draws(seed)) for seed in range(20)}) == 20
    # The draws do not depend on how many are made at a time.
    assert draws(1) == draws(1, (50_000, 700_000))
    runs = [len(list(group)) for _, group in itertools.groupby(draws(1))]
    assert np.mean(runs) == pytest.approx(2, abs=0.2)


def test_a_probability_of_almost_one():
    mixed = mix([3, 2], probabilities=[1 - 1e-7, 1e-7], stopping_strategy="first_exhausted", seed=0)
    assert mixed.tolist() == [[0, 0], [0, 1], [0, 2]]


@pytest.mark.parametrize(
    ("sizes", "probabilities", "message"),
    [
        ([4, 0], [0.5, 0.5], "part 2 of the data has no sample to draw"),
        (
            [4, 10**9],
            [0.9, 0.1],
            "0.1 is too small: an epoch with all 1,000,000,000 samples of part 2 would have about 1.0",
        ),
    ],
)
def test_epochs_that_cannot_be(sizes: list[int], probabilities: list[float], message: str):
    with pytest.raises(ConfigError, match=f"^data.probabilities: {message}"):
        mix(sizes, probabilities=probabilities, stopping_strategy="all_exhausted", seed=0)
