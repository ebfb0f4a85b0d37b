"""Random orders in constant memory: a keyed bijection of 0..n-1, and the keys of everything random in the data.

A shuffled list of 10^10 windows would take 80 GB and minutes. Instead position i of an epoch holds window pi(i), with
pi a Feistel network over Z_a x Z_b, a * b just above n, modular addition in place of exclusive or (the FE2 scheme of
Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). A value that falls outside 0..n-1 is sent through
again until it does not ("cycle walking"), which keeps the map a bijection; fewer than a of a * b values need it.
"""

import math
from hashlib import blake2b

import numpy as np

_ROUNDS = 8
_MAX_SIZE = 1 << 62
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: its multiples spread neighbouring groups over all keys."""

_Modulus = np.uint64 | np.ndarray


def derive_key(*parts: int | str, size: int = 16) -> bytes:
    """`size` bytes (at most 64) that depend on every part and on nothing else."""
    return blake2b(repr(parts).encode(), digest_size=size).digest()


def derive_int(*parts: int | str) -> int:
    """A 128-bit integer that depends on every part: a Philox key, or a draw from a range far below 2^128."""
    return int.from_bytes(derive_key(*parts), "little")


class KeyedPermutation:
    """A bijection of 0..size-1 that looks random, fixed by the key; evaluated where asked."""

    def __init__(self, size: int, *key: int | str) -> None:
        """Args:
        size: 1 <= size <= 2^62.
        key: what the order depends on, for example ("order", seed, epoch).
        """
        if not 1 <= size <= _MAX_SIZE:
            raise ValueError(f"a permutation needs 1 to 2^62 elements, not {size}")
        self._size = size
        left = math.isqrt(size - 1) + 1  # the square root, rounded up
        self._moduli = (np.uint64(left), np.uint64(-(-size // left)))
        self._round_keys = np.frombuffer(derive_key(*key, size=8 * _ROUNDS), "<u8")

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Images of `indices` (any shape, integers in 0..size-1) as int64."""
        values = np.asarray(indices).astype(np.uint64)
        if values.size and int(values.max()) >= self._size:
            raise IndexError(f"index {int(values.max())} in a permutation of {self._size} elements")
        flat = _encrypt(values.reshape(-1), self._moduli, self._round_keys)
        outside = np.flatnonzero(flat >= self._size)
        while outside.size:
            flat[outside] = _encrypt(flat[outside], self._moduli, self._round_keys)
            outside = outside[flat[outside] >= self._size]
        return flat.astype(np.int64).reshape(values.shape)


class KeyedPermutations:
    """A bijection of 0..size-1 for each of many groups, none like another, fixed by the key; evaluated where asked."""

    def __init__(self, sizes: np.ndarray, *key: int | str) -> None:
        """Args:
        sizes: (groups,) elements of each group, at least 1.
        key: what the orders depend on.
        """
        self._sizes = sizes.astype(np.uint64)
        self._left = np.ceil(np.sqrt(sizes)).astype(np.uint64)  # a rounding error costs no bijection, only speed
        self._right = (self._sizes + self._left - np.uint64(1)) // self._left
        self._round_keys = np.frombuffer(derive_key(*key, size=8 * _ROUNDS), "<u8")[:, None]

    def __call__(self, groups: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Images, (n,) int64, of the elements `indices` (n,) of the groups `groups` (n,)."""
        values, sizes = indices.astype(np.uint64), self._sizes[groups]
        if (values >= sizes).any():
            raise IndexError("an index beyond the size of its group")
        moduli = (self._left[groups], self._right[groups])
        round_keys = self._round_keys + groups.astype(np.uint64) * _GOLDEN
        values = _encrypt(values, moduli, round_keys)
        outside = np.flatnonzero(values >= sizes)
        while outside.size:
            left, right = moduli
            values[outside] = _encrypt(values[outside], (left[outside], right[outside]), round_keys[:, outside])
            outside = outside[values[outside] >= sizes[outside]]
        return values.astype(np.int64)


def _encrypt(values: np.ndarray, moduli: tuple[_Modulus, _Modulus], round_keys: np.ndarray) -> np.ndarray:
    """One pass of the network over values (n,) uint64 below the product of the moduli.

    Args:
        moduli: a and b, for all values or (n,) each.
        round_keys: (rounds,) uint64, or (rounds, n).
    """
    left_size, right_size = moduli
    left, right = values // right_size, values % right_size
    for turn in range(0, _ROUNDS, 2):
        left = (left + _mix(right, round_keys[turn]) % left_size) % left_size
        right = (right + _mix(left, round_keys[turn + 1]) % right_size) % right_size
    return left * right_size + right


def _mix(values: np.ndarray, key: np.uint64 | np.ndarray) -> np.ndarray:
    """A 64-bit hash of uint64 values: two passes of the splitmix64 finaliser (Steele, Lea, Flood, 2014)."""
    mixed = values
    for _ in range(2):
        mixed = mixed + key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed
