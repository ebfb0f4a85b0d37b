"""The keyed permutation: a bijection for every size, evenly spread, fixed by its key."""

import tracemalloc

import numpy as np
import pytest

from trainer.data.permutation import KeyedPermutation, KeyedPermutations, derive_int, derive_key

SIZES = [*range(1, 70), 97, 127, 128, 129, 255, 256, 257, 997, 1023, 1024, 1025, 4095, 4097, 10007, 65535, 65537]


@pytest.mark.parametrize("seed", [0, 1])
def test_bijective_for_every_size(seed: int) -> None:
    for size in SIZES:
        images = KeyedPermutation(size, "t", seed)(np.arange(size))
        assert images.dtype == np.int64
        assert np.array_equal(np.sort(images), np.arange(size)), size


def test_values_are_pinned() -> None:
    """Another version of the code must not deal another order to a resumed run."""
    assert KeyedPermutation(10, "order", 0, 0)(np.arange(10)).tolist() == [8, 4, 9, 2, 1, 6, 0, 3, 7, 5]
    huge = KeyedPermutation(10**13, "order", 7, 3)
    assert huge(np.array([0, 1, 10**13 - 1])).tolist() == [8696750431216, 2578398065427, 4135967189043]


def test_huge_sizes_stay_distinct_within_range_and_small_in_memory() -> None:
    size = 10**13
    indices = np.concatenate([np.arange(5000), np.arange(size - 5000, size)])
    tracemalloc.start()
    images = KeyedPermutation(size, "t", 0)(indices)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert images.min() >= 0
    assert images.max() < size
    assert np.unique(images).size == indices.size
    assert peak < 4_000_000


def test_one_at_a_time_equals_all_at_once() -> None:
    permutation = KeyedPermutation(1001, "t", 5)
    together = permutation(np.arange(1001).reshape(7, 143))
    assert together.shape == (7, 143)
    assert [int(permutation(np.array(i))) for i in range(1001)] == together.reshape(-1).tolist()


def test_key_decides_the_order() -> None:
    orders = {
        tuple(KeyedPermutation(50, *key)(np.arange(50)).tolist())
        for key in [("t", 0, 0), ("t", 0, 1), ("t", 1, 0), ("u", 0, 0), ("t", 10, 0), ("t", 1, 0, 0)]
    }
    assert len(orders) == 6


@pytest.mark.parametrize("size", [10, 64, 101])
def test_every_place_gets_every_window_equally_often(size: int) -> None:
    """Chi-square over 3,000 keys of the table place x window; its mean is the degrees of freedom."""
    keys = 3000
    table = np.zeros((size, size))
    for key in range(keys):
        table[np.arange(size), KeyedPermutation(size, "chi", key)(np.arange(size))] += 1
    expected = keys / size
    chi_square = float(((table - expected) ** 2 / expected).sum())
    degrees = (size - 1) ** 2
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("size", [1000, 99991, 10**12 + 39])
def test_neighbours_are_far_apart(size: int) -> None:
    """Neighbouring places, and the same place under neighbouring keys, are uncorrelated."""
    count = min(size - 1, 20000)
    images = KeyedPermutation(size, "t", 0)(np.arange(count + 1)) / size
    other = KeyedPermutation(size, "t", 1)(np.arange(count + 1)) / size
    bound = 5 / np.sqrt(count)
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < bound
    assert abs(np.corrcoef(images, np.arange(count + 1))[0, 1]) < bound
    assert abs(np.corrcoef(images, other)[0, 1]) < bound


def test_out_of_range() -> None:
    with pytest.raises(IndexError, match="index 5 in a permutation of 5"):
        KeyedPermutation(5, "t")(np.array([5]))
    for size in (0, -1, (1 << 62) + 1):
        with pytest.raises(ValueError, match="1 to 2\\^62"):
            KeyedPermutation(size, "t")


def test_keys_depend_on_every_part() -> None:
    assert len({derive_int("a", 1), derive_int("a", 2), derive_int("b", 1), derive_int("a", "1"), derive_int("a")}) == 5
    assert len(derive_key("a", size=64)) == 64


def test_groups_have_bijections_of_their_own() -> None:
    """Every size, and groups of one size, each their own order; the same one at a time as all at once."""
    sizes = np.array([*SIZES, 50, 50, 50])
    permutations = KeyedPermutations(sizes, "t", 0)
    orders = []
    for group, size in enumerate(sizes.tolist()):
        images = permutations(np.full(size, group), np.arange(size))
        assert np.array_equal(np.sort(images), np.arange(size)), size
        orders.append(tuple(images.tolist()))
    assert len(set(orders[-3:])) == 3
    groups = np.arange(len(sizes)).repeat(sizes)
    indices = np.concatenate([np.arange(size) for size in sizes])
    assert permutations(groups, indices).tolist() == [image for order in orders for image in order]
    assert KeyedPermutations(sizes, "t", 1)(groups, indices).tolist() != permutations(groups, indices).tolist()


def test_group_values_are_pinned() -> None:
    """Another version of the code must not deal another order to a resumed run."""
    permutations = KeyedPermutations(np.array([1, 10, 10]), "deal", 0, 0)
    images = permutations(np.array([0, *[1] * 10, *[2] * 10]), np.array([0, *range(10), *range(10)]))
    assert images.tolist() == [0, 8, 0, 2, 1, 7, 9, 6, 3, 4, 5, 6, 3, 8, 4, 5, 9, 1, 0, 2, 7]


@pytest.mark.parametrize("size", [10, 64])
def test_every_place_of_every_group_gets_every_element_equally_often(size: int) -> None:
    groups, table = 3000, np.zeros((size, size))
    permutations = KeyedPermutations(np.full(groups, size), "chi")
    images = permutations(np.arange(groups).repeat(size), np.tile(np.arange(size), groups))
    np.add.at(table, (np.tile(np.arange(size), groups), images), 1)
    expected = groups / size
    chi_square = float(((table - expected) ** 2 / expected).sum())
    degrees = (size - 1) ** 2
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees)


def test_out_of_range_of_a_group() -> None:
    with pytest.raises(IndexError, match="beyond the size of its group"):
        KeyedPermutations(np.array([5, 3]), "t")(np.array([0, 1]), np.array([4, 3]))
