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
        flat = self._encrypt(values.reshape(-1))
        outside = np.flatnonzero(flat >= self._size)
        while outside.size:
            flat[outside] = self._encrypt(flat[outside])
            outside = outside[flat[outside] >= self._size]
        return flat.astype(np.int64).reshape(values.shape)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left_size, right_size = self._moduli
        left, right = values // right_size, values % right_size
        for turn in range(0, _ROUNDS, 2):
            left = (left + _mix(right, self._round_keys[turn]) % left_size) % left_size
            right = (right + _mix(left, self._round_keys[turn + 1]) % right_size) % right_size
        return left * right_size + right


def _mix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """A 64-bit hash of uint64 values: two passes of the splitmix64 finaliser (Steele, Lea, Flood, 2014)."""
    mixed = values
    for _ in range(2):
        mixed = mixed + key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed
