"""Which pieces lie in which row of which epoch.

Rows are planned once, from the lengths alone. An epoch then changes what lies where, never the plan: one keyed
permutation deals the pieces of equal length to the places of their length, another one sends the rows to the indices
of the epoch. So every epoch has the same rows by lengths, reads every piece once, and is known without being stored.
"""

from functools import lru_cache

import numpy as np

from configs.data import Packing
from trainer.data.packing import by_length, one_each, pack, pack_in_order
from trainer.data.permutation import KeyedPermutation, KeyedPermutations


class RowPlan:
    """Rows of pieces, the same number in every epoch. 4 bytes per piece, 8 with best_fit, and 4 per row."""

    def __init__(self, lengths: np.ndarray, *, seq_len: int, packing: Packing, seed: int, shuffle: bool) -> None:
        """Args:
        lengths: (n,) integers from 1 to `seq_len`: of the pieces.
        seq_len: positions of a row.
        packing: `best_fit`, or `sequential` and `none`, which keep the order of the pieces inside rows.
        shuffle: every epoch deals and orders anew; else all are like the plan.
        """
        self._seed = seed
        self._shuffle = shuffle
        self._deals = shuffle and packing == "best_fit"
        self._sorted: np.ndarray | None = None
        """(n,) pieces from the longest to the shortest; then the rows hold places in this list."""
        match packing:
            case "best_fit":
                order = by_length(lengths, seq_len)
                self._rows = pack(lengths[order], seq_len)
                self._sorted = order.astype(self._rows.order.dtype)
                counts = np.bincount(lengths, minlength=1)[::-1]
                self._class_sizes = counts[counts > 0]
                self._class_ends = np.cumsum(self._class_sizes)
            case "sequential":
                self._rows = pack_in_order(lengths, seq_len)
            case "none":
                self._rows = one_each(len(lengths))
        self._row_order = lru_cache(4)(self._make_row_order)  # an epoch's keys, so that fills do not derive them again
        self._deal = lru_cache(4)(self._make_deal)

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    def pieces(self, epoch: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What lies in the rows at these indices (n,) of an epoch.

        Returns:
            Piece numbers, row after row, and (n,) how many of them are each row's.
        """
        rows = self._row_order(epoch)(indices) if self._shuffle else indices
        ends = self._rows.row_ends[rows].astype(np.int64)
        starts = np.where(rows > 0, self._rows.row_ends[rows - 1], 0)
        counts = ends - starts
        stops = np.cumsum(counts)
        places = np.arange(counts.sum()) + np.repeat(ends - stops, counts)
        inside = self._rows.order[places]
        if self._sorted is None:
            return inside, counts
        return self._sorted[self._dealt(epoch, inside) if self._deals else inside], counts

    def _dealt(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Where in the sorted list the pieces are that an epoch deals to the places of the list."""
        classes = np.searchsorted(self._class_ends, places, side="right")
        starts = self._class_ends[classes] - self._class_sizes[classes]
        return starts + self._deal(epoch)(classes, places - starts)

    def _make_row_order(self, epoch: int) -> KeyedPermutation:
        return KeyedPermutation(self.num_rows, "chat rows", self._seed, epoch)

    def _make_deal(self, epoch: int) -> KeyedPermutations:
        return KeyedPermutations(self._class_sizes, "chat deal", self._seed, epoch)
