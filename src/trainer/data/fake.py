"""`type = "fake"`: made-up rows through the same path as real ones, for tests and speed."""

from typing import Any, Literal

import numpy as np

from trainer.data.permutation import derive_int
from trainer.data.row import Rows


class FakeSource:
    """A RowSource that draws every row from its own generator, keyed by (seed, epoch, index)."""

    def __init__(
        self,
        *,
        seq_len: int,
        vocab_size: int,
        seed: int,
        num_rows: int,
        length: Literal["fixed", "variable"],
        input_ids: Literal["increasing", "random"],
    ) -> None:
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._seed = seed
        self._num_rows = num_rows
        self._length = length
        self._input_ids = input_ids

    @property
    def num_rows(self) -> int:
        return self._num_rows

    @property
    def seq_len(self) -> int:
        return self._seq_len

    @property
    def full_rows(self) -> bool:
        return self._length == "fixed"

    @property
    def description(self) -> str:
        return f"{self._num_rows:,} made-up rows of {self._seq_len} per epoch"

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {
            "type": "fake",
            "seq_len": self._seq_len,
            "seed": self._seed,
            "vocab_size": self._vocab_size,
            "num_rows": self._num_rows,
            "length": self._length,
            "input_ids": self._input_ids,
        }

    def fill(self, epoch: int, indices: np.ndarray, out: Rows) -> None:
        for row, index in enumerate(indices.tolist()):
            key = derive_int("fake", self._seed, epoch, index)
            generator = np.random.Generator(np.random.Philox(key=key))
            lengths = self._lengths(generator)
            ids = self._ids(generator, lengths)
            out.input_ids[row] = ids[:-1]
            out.labels[row] = ids[1:]
            out.segment_lengths[row] = lengths
        out.num_padding[: len(indices)] = 0

    def _lengths(self, generator: np.random.Generator) -> np.ndarray:
        if self._length == "fixed":
            return np.array([self._seq_len])
        longest = max(1, self._seq_len // 4)
        ends = np.cumsum(generator.integers(1, longest, self._seq_len, endpoint=True))
        ends = np.append(ends[ends < self._seq_len], self._seq_len)
        return np.diff(ends, prepend=0)

    def _ids(self, generator: np.random.Generator, lengths: np.ndarray) -> np.ndarray:
        """(seq_len + 1,) ids of the row's documents; the last one goes on beyond the row."""
        if self._input_ids == "random":
            return generator.integers(0, self._vocab_size, self._seq_len + 1)
        counts = lengths.copy()
        counts[-1] += 1
        starts = np.cumsum(counts) - counts
        firsts = generator.integers(0, self._vocab_size, counts.size)
        return (np.arange(self._seq_len + 1) + np.repeat(firsts - starts, counts)) % self._vocab_size
