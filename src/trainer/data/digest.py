"""Digests of rows: two runs that read the same rows in the same places of a step have the same digest.

Each row is hashed with its place in the step into two 32-bit lanes; a step's digest is the sum of its rows' lanes
modulo 2^32. A sum can be taken over ranks by one all-reduce of integers, so the digest does not depend on how the
rows were dealt to ranks, micro-batches or threads.
"""

from hashlib import blake2b

import numpy as np

from trainer.data.row import Rows

Digest = tuple[int, int]


def digest_rows(rows: Rows, places: np.ndarray) -> Digest:
    """Sum of the rows' digests.

    Args:
        places: (n,) int64, where in the step each row stands.
    """
    total: Digest = (0, 0)
    for row, place in enumerate(places.tolist()):
        state = blake2b(place.to_bytes(8, "little"), digest_size=8)
        for values in (rows.input_ids[row], rows.labels[row], rows.segment_lengths[row]):
            state.update(np.ascontiguousarray(values, "<i8").data)
        value = int.from_bytes(state.digest(), "little")
        total = add_digests(total, (value & 0xFFFFFFFF, value >> 32))
    return total


def add_digests(a: Digest, b: Digest) -> Digest:
    return (a[0] + b[0]) & 0xFFFFFFFF, (a[1] + b[1]) & 0xFFFFFFFF


def format_digest(lanes: tuple[int, int]) -> str:
    """16 hexadecimal digits of two 32-bit lanes; sums over ranks need not be reduced first."""
    low, high = add_digests(lanes, (0, 0))
    return f"{high:08x}{low:08x}"
