"""`type = "tokens"`: windows of the token pool.

The pool is read as a ring. Epoch e starts at its own seeded offset o; window w of the epoch begins at position
(o + w * seq_len) mod num_tokens, and there are num_tokens // seq_len of them, so no token is read twice. The few
tokens that do not fill a window are other ones every epoch. A window reads one token more than it has inputs: the
last input's target is the next window's first input.
"""

from functools import lru_cache
from typing import Any

import numpy as np

from configs.errors import ConfigError
from models.batch import IGNORE_INDEX
from trainer.data.permutation import KeyedPermutation, derive_int
from trainer.data.row import RowError, Rows
from trainer.data.shards import TokenPool


class TokensSource:
    """A RowSource over a token pool. Shuffled unless told otherwise; then every epoch reads in order from token 0."""

    def __init__(
        self,
        pool: TokenPool,
        *,
        seq_len: int,
        vocab_size: int,
        seed: int,
        shuffle: bool,
        document_masking: bool,
        tokenizer: dict[str, Any],
    ) -> None:
        """Args:
            seq_len: inputs per row.
            vocab_size: ids from here on are refused.
            document_masking: segments are the documents; else each row is one segment.
            tokenizer: identity of the tokenizer, part of the fingerprint.

        Raises:
            ConfigError: the pool cannot fill one row, or its document ends are not known.
        """
        if pool.num_tokens < seq_len + 1:
            raise ConfigError.one(
                "data.seq_len",
                f"one row reads seq_len + 1 = {seq_len + 1} tokens, but the shards of data.paths hold only "
                f"{pool.num_tokens} of them; lower data.seq_len or add data",
            )
        if document_masking and pool.chunk_shuffled:
            raise ConfigError.one(
                "data.document_masking",
                f"{pool.chunk_shuffled} is chunk-shuffled: the ends in its index are not all document ends, so "
                "documents cannot be told apart; set data.document_masking = false or tokenize without "
                "shuffle_chunk_size",
            )
        self._pool = pool
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._seed = seed
        self._shuffle = shuffle
        self._document_masking = document_masking
        self._tokenizer = tokenizer
        self._order = lru_cache(4)(self._make_order)  # an epoch's keys, so that rows do not derive them again

    @property
    def num_rows(self) -> int:
        return self._pool.num_tokens // self._seq_len

    @property
    def seq_len(self) -> int:
        return self._seq_len

    @property
    def full_rows(self) -> bool:
        return not self._document_masking

    @property
    def pool(self) -> TokenPool:
        return self._pool

    @property
    def left_out_tokens(self) -> int:
        """Tokens that no window of an epoch reads as input; other ones every epoch when shuffled."""
        return self._pool.num_tokens - self.num_rows * self._seq_len

    @property
    def description(self) -> str:
        return (
            f"{self._pool.num_tokens:,} tokens in {self._pool.num_documents:,} documents: {self.num_rows:,} rows of "
            f"{self._seq_len} per epoch, {self.left_out_tokens:,} tokens left out of each"
        )

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {
            "type": "tokens",
            "seq_len": self._seq_len,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "document_masking": self._document_masking,
            "tokenizer": self._tokenizer,
            "pool": self._pool.fingerprint,
        }

    def fill(self, epoch: int, indices: np.ndarray, out: Rows) -> None:
        starts = self._starts(epoch, indices).tolist()
        for row, start in enumerate(starts):
            ids = self._read(start, self._seq_len + 1)
            out.input_ids[row] = ids[:-1]
            out.labels[row] = ids[1:]
            self._mask_labels(start, out.labels[row])
            out.segment_lengths[row] = self._segments(start)
        out.num_padding[: len(starts)] = 0

    def _make_order(self, epoch: int) -> tuple[KeyedPermutation, int]:
        permutation = KeyedPermutation(self.num_rows, "tokens order", self._seed, epoch)
        return permutation, derive_int("tokens offset", self._seed, epoch) % self._pool.num_tokens

    def _starts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        """Pool positions of the first inputs of the rows at these indices of the epoch."""
        if not self._shuffle:
            return indices.astype(np.int64) * self._seq_len
        permutation, offset = self._order(epoch)
        return (offset + permutation(indices) * self._seq_len) % self._pool.num_tokens

    def left_out_targets(self, epoch: int) -> list[tuple[int, int]]:
        """(start, count) of the stretches of the pool that hold no target of an epoch."""
        offset = self._order(epoch)[1] if self._shuffle else 0
        start = (offset + self.num_rows * self._seq_len + 1) % self._pool.num_tokens
        return self._pieces(start, self.left_out_tokens)

    def _pieces(self, start: int, count: int) -> list[tuple[int, int]]:
        """(start, count) of a stretch of the ring as stretches of the pool: two when it wraps."""
        first = min(count, self._pool.num_tokens - start)
        return [(start, first)] if first == count else [(start, first), (0, count - first)]

    def _read(self, start: int, count: int) -> np.ndarray:
        parts = []
        for begin, length in self._pieces(start, count):
            ids = self._pool.read(begin, length)
            if int(ids.max()) >= self._vocab_size:
                at = int(np.argmax(ids >= self._vocab_size))
                path, offset = self._pool.locate(begin + at)
                raise RowError(
                    f"{path}: token {offset} has id {ids[at]}, but the model has only {self._vocab_size} embeddings"
                )
            parts.append(ids)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _mask_labels(self, start: int, labels: np.ndarray) -> None:
        """Take the loss from labels (seq_len,) that a loss file does not count; label i is token start + i + 1."""
        done = 0
        for begin, length in self._pieces((start + 1) % self._pool.num_tokens, self._seq_len):
            counts = self._pool.loss_mask(begin, length)
            if counts is not None:
                labels[done : done + length][~counts] = IGNORE_INDEX
            done += length

    def _segments(self, start: int) -> np.ndarray:
        """Lengths of the segments of the row whose inputs begin at `start`."""
        if not self._document_masking:
            return np.array([self._seq_len])
        borders, done = [np.zeros(1, np.int64)], 0
        for begin, length in self._pieces(start, self._seq_len):
            # The end of the pool is the end of its last document, so the wrap is a border without a special case.
            borders.append(self._pool.document_ends(begin, begin + length) - begin + done)
            done += length
        lengths = np.diff(np.append(np.concatenate(borders), self._seq_len))
        return lengths if lengths[-1] else lengths[:-1]  # none is left over when a document ends with the row
