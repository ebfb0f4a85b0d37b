"""A held-out set at one window length: `val/<set>/<metric>@<length>`."""

import numpy as np
from torch import Tensor

from configs.errors import ConfigError
from models.batch import IGNORE_INDEX
from trainer.data.packing import pack
from trainer.errors import RunError
from trainer.validation.cut import begins_of
from trainer.validation.task import Filled, padding_rows
from trainer.validation.windows import KEY, DocumentScores, LikelihoodSet, Scores

_NO_WINDOWS = np.empty(0, np.int64)


class SetTask:
    """One set at one window length; each window is a piece. See Task for the methods."""

    def __init__(self, set_: LikelihoodSet, *, seq_len: int, micro_batch_tokens: int, text_ids: Tensor) -> None:
        """Args:
            set_: what is scored.
            seq_len: inputs of a window at most, and positions of a row.
            micro_batch_tokens: positions of a forward pass.
            text_ids: (vocab_size,) bool on the device of the model: ids that spell text.

        Raises:
            ConfigError: the set is damaged or has nothing to score.
        """
        self.set = set_
        self.seq_len = seq_len
        self.rows_per_forward = micro_batch_tokens // seq_len
        self.text_ids = text_ids
        self._windows = set_.windows(seq_len)
        self.num_pieces = len(self._windows.sequences)
        if not self.num_pieces:
            raise ConfigError.one(
                KEY, f"{set_.name} has nothing to score at {seq_len} tokens: {self._left_out or 'it has no documents'}"
            )
        self._rows = pack(self._windows.num_inputs, seq_len)

    @property
    def name(self) -> str:
        return f"val/{self.set.name}@{length_name(self.seq_len)}"

    @property
    def greedy(self) -> bool:
        return self.set.wants_hits

    @property
    def costs(self) -> np.ndarray:
        lengths = self._windows.num_inputs[self._rows.order].astype(np.float64)
        starts = np.concatenate([[0], self._rows.row_ends[:-1]])
        return np.add.reduceat(lengths * (lengths + 1) / 2, starts)

    @property
    def notes(self) -> list[str]:
        return self.set.notes

    @property
    def content(self) -> str:
        content = f"{self.num_pieces} windows of {self.set.num_documents} documents in {self._rows.num_rows} rows"
        return f"{content} ({self._left_out})" if self._left_out else content

    @property
    def _left_out(self) -> str:
        return ", ".join(f"{count} left out: {reason}" for reason, count in self._windows.left_out.items())

    @property
    def digest(self) -> str:
        return self.set.digest

    def fill(self, rows: np.ndarray) -> Filled:
        out = padding_rows(len(rows), self.seq_len)
        # All windows of the pass at once: short ones come by hundreds, and a loop would be slower than the device.
        of_rows = [self._rows.pieces_of(row) if row >= 0 else _NO_WINDOWS for row in rows.tolist()]
        numbers = np.concatenate(of_rows)
        read = self.set.read(self._windows, numbers)
        pieces, start = [], 0
        for slot, own in enumerate(of_rows):
            lengths = self._windows.num_inputs[own].astype(np.int64)
            length = int(lengths.sum())
            out.input_ids[slot, :length] = read.input_ids[start : start + length]
            out.labels[slot, :length] = read.labels[start : start + length]
            start += length
            padding = self.seq_len - length
            out.num_padding[slot] = padding
            out.segment_lengths[slot] = np.append(lengths, padding) if padding else lengths
            pieces.append(np.append(own, -1) if padding else own)
        pieces = np.concatenate(pieces)
        begins = begins_of(self._windows.num_inputs[numbers])
        counts = np.zeros((len(pieces), 2), np.int64)
        counts[pieces >= 0, 0] = np.add.reduceat(read.labels != IGNORE_INDEX, begins, dtype=np.int64)
        counts[pieces >= 0, 1] = read.num_bytes
        return Filled(rows=out, pieces=pieces, counts=counts)

    def metrics(self, results: np.ndarray) -> dict[str, float]:
        try:
            metrics = self.set.metrics(self._scores(results))
        except RunError as error:
            raise RunError(f"{self.name}: {error}") from error
        return {f"val/{self.set.name}/{name}@{length_name(self.seq_len)}": value for name, value in metrics.items()}

    def documents(self, results: np.ndarray) -> DocumentScores:
        """The records of the documents, of the results of all pieces as `metrics` takes them."""
        return self.set.documents(self._scores(results))

    def _scores(self, results: np.ndarray) -> Scores:
        # bincount adds up one after the other, so a sequence's sum is that of its windows in their order.
        nats, text_nats, hits, num_tokens, num_bytes = (
            np.bincount(self._windows.sequences, weights=column, minlength=self.set.num_sequences)
            for column in results.T
        )
        return Scores(nats=nats, text_nats=text_nats, num_tokens=num_tokens, num_bytes=num_bytes, hits=hits)


def length_name(seq_len: int) -> str:
    """`2k` for 2048, `1000` for 1000."""
    return f"{seq_len // 1024}k" if seq_len % 1024 == 0 else str(seq_len)
