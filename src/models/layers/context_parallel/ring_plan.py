"""Which queries of a rank meet which keys of another one, when rows lie over ranks in zigzag shares.

A row of `seq_len` positions is cut into 2 x size chunks, and rank r has chunks r and 2 x size - 1 - r: so every rank
has as many causal pairs of a row as any other. Documents are contiguous, which makes all of this small:

- the part of a document in a share is contiguous there, even when it lies in both chunks, since then it covers
  everything between them;
- of the keys of rank s and the queries of rank r, s < r, only the document that runs over the end of chunk s counts,
  with its part of chunk s; for s > r only the one at the start of r's second chunk, with all that s has of it.

So one rectangle without a mask is all that two ranks have to do for a row, and it says too which keys have to travel.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class Span:
    """Positions of one or more neighbouring rows, counted within a share."""

    first_row: int
    num_rows: int
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        """Of a tensor of rows."""
        return slice(self.first_row, self.first_row + self.num_rows)

    @property
    def positions(self) -> slice:
        """Of a share."""
        return slice(self.start, self.stop)

    @property
    def num_tokens(self) -> int:
        """Of all its rows."""
        return self.num_rows * (self.stop - self.start)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Queries of one share, and the keys of another that all of them see."""

    queries: Span
    keys: Span


@dataclass(frozen=True, kw_only=True)
class RingStep:
    """One turn: keys go out to `target`, others come in from `source` (ranks of the group)."""

    source: int
    target: int
    received: tuple[Pair, ...]
    """This rank's queries with the keys of `source`, by rows."""

    sent_keys: tuple[Span, ...]
    """Of this rank, those that queries of `target` meet, by rows."""

    @property
    def received_keys(self) -> tuple[Span, ...]:
        """Of `source`, those that queries of this rank meet, by rows."""
        return tuple(pair.keys for pair in self.received)


@dataclass(frozen=True, kw_only=True)
class RingPlan:
    """What one rank does for one batch."""

    documents: tuple[int, ...]
    """Lengths of the documents' parts in this rank's share, rows one after the other."""

    steps: tuple[RingStep, ...]
    """One fewer than there are ranks."""


def ring_plan(borders: npt.NDArray[np.int32], *, seq_len: int, rank: int, size: int) -> RingPlan:
    """
    Args:
        borders: 0 and the ends of the documents of all whole rows, (documents + 1,); none lies in two rows.
        seq_len: of a whole row, a multiple of 2 x size.
        rank: whose plan, of the ranks that share the rows.
        size: number of these ranks.
    """
    return _plan(borders.astype(np.int64).tobytes(), seq_len, rank, size)


@lru_cache(maxsize=4)  # every layer asks for that of the same batch, forward and backward
def _plan(borders: bytes, seq_len: int, rank: int, size: int) -> RingPlan:
    ends = np.frombuffer(borders, np.int64)
    starts_of_rows = np.searchsorted(ends, np.arange(0, ends[-1] + 1, seq_len))
    rows = [
        [int(end) - row * seq_len for end in ends[first : last + 1]]
        for row, (first, last) in enumerate(pairwise(starts_of_rows))
    ]
    steps = []
    for turn in range(1, size):
        source, target = (rank - turn) % size, (rank + turn) % size
        received = _pairs(rows, queries_of=rank, keys_of=source, size=size)
        sent = _pairs(rows, queries_of=target, keys_of=rank, size=size)
        keys = tuple(pair.keys for pair in sent)
        steps.append(RingStep(source=source, target=target, received=received, sent_keys=keys))
    documents = [length for row in rows for length in np.diff([share_index(p, row[-1], rank, size) for p in row])]
    return RingPlan(documents=tuple(int(length) for length in documents if length), steps=tuple(steps))


def share_index(position: int, seq_len: int, rank: int, size: int) -> int:
    """How many positions of the share of `rank` come before `position` of a row."""
    chunk = seq_len // (2 * size)
    first, second = rank * chunk, (2 * size - 1 - rank) * chunk
    return min(max(position - first, 0), chunk) + min(max(position - second, 0), chunk)


def _pairs(rows: list[list[int]], *, queries_of: int, keys_of: int, size: int) -> tuple[Pair, ...]:
    """Those of all rows; neighbouring rows with equal spans are one pair."""
    spans = [_meeting(borders, queries_of=queries_of, keys_of=keys_of, size=size) for borders in rows]
    pairs = []
    for found, group in groupby(enumerate(spans), key=lambda numbered: numbered[1]):
        members = [row for row, _ in group]
        if found is not None:
            queries, keys = (
                Span(first_row=members[0], num_rows=len(members), start=start, stop=stop) for start, stop in found
            )
            pairs.append(Pair(queries=queries, keys=keys))
    return tuple(pairs)


def _meeting(
    borders: list[int], *, queries_of: int, keys_of: int, size: int
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """First and last + 1 of the queries and of the keys that meet in one row; None where there are none."""
    seq_len = borders[-1]
    chunk = seq_len // (2 * size)
    if keys_of < queries_of:
        # all queries come after the first chunk of keys and before the second
        inside, first_query, last_key = (keys_of + 1) * chunk - 1, 0, chunk
    else:
        # all keys come between the two chunks of queries
        inside, first_query, last_key = (2 * size - 1 - queries_of) * chunk, chunk, 2 * chunk
    document = bisect_right(borders, inside)
    first_key = share_index(borders[document - 1], seq_len, keys_of, size)
    last_query = share_index(borders[document], seq_len, queries_of, size)
    if first_query >= last_query or first_key >= last_key:
        return None
    return (first_query, last_query), (first_key, last_key)
