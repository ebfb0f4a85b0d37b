"""A held-out set of text at one window length: `val/<set>/<metric>@<length>`."""

import math

import numpy as np
import torch
from torch import Tensor

from configs.errors import ConfigError
from models.batch import IGNORE_INDEX
from trainer.data.packing import pack
from trainer.data.row import Rows
from trainer.errors import RunError
from trainer.validation.task import padding_rows, perplexity
from trainer.validation.windows import KEY, LikelihoodSet


class SetTask:
    """One set at one window length. See Task for the methods."""

    num_sums = 4
    """Nats and number of the scored tokens, then nats and bytes of those among them that spell text."""

    def __init__(self, set_: LikelihoodSet, *, seq_len: int, micro_batch_tokens: int, byte_counts: Tensor) -> None:
        """Args:
            set_: what is scored.
            seq_len: tokens per window.
            micro_batch_tokens: positions of a forward pass.
            byte_counts: (vocab_size,) int64 on the device of the model, see token_bytes.

        Raises:
            ConfigError: the set is damaged or has nothing to score.
        """
        self.set = set_
        self.seq_len = seq_len
        self.rows_per_forward = micro_batch_tokens // seq_len
        self._windows = set_.windows(seq_len)
        if not len(self._windows.starts):
            raise ConfigError.one(KEY, f"no document of {set_.name} is long enough to be scored")
        self._rows = pack(self._windows.num_inputs, seq_len)
        self._byte_counts = byte_counts

    @property
    def name(self) -> str:
        return f"val/{self.set.name}@{length_name(self.seq_len)}"

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    @property
    def notes(self) -> list[str]:
        return self.set.notes

    @property
    def content(self) -> str:
        content = f"{len(self._windows.starts)} windows of {self.set.num_documents} documents in {self.num_rows} rows"
        if self._windows.num_unscorable:
            content += f" ({self._windows.num_unscorable} documents are too short to score)"
        return content

    def fill(self, first: int) -> Rows:
        out = padding_rows(self.rows_per_forward, self.seq_len)
        for slot, row in enumerate(range(first, min(first + self.rows_per_forward, self.num_rows))):
            lengths = []
            position = 0
            for window in self._rows.pieces_of(row):
                length = int(self._windows.num_inputs[window])
                input_ids, labels = self.set.read(int(self._windows.starts[window]), length)
                out.input_ids[slot, position : position + length] = input_ids
                out.labels[slot, position : position + length] = labels
                lengths.append(length)
                position += length
            padding = self.seq_len - position
            out.num_padding[slot] = padding
            out.segment_lengths[slot] = np.array(lengths + [padding] * (padding > 0), np.int64)
        return out

    def sums(self, nats: Tensor, labels: Tensor) -> Tensor:
        scored = labels != IGNORE_INDEX
        num_bytes = self._byte_counts[labels.clamp(min=0)] * scored
        return torch.stack([nats.sum(), scored.sum(), (nats * (num_bytes > 0)).sum(), num_bytes.sum()])

    def metrics(self, sums: list[float]) -> dict[str, float]:
        nats, tokens, text_nats, text_bytes = sums
        if not tokens or not text_bytes:
            raise RunError(
                f"held-out set {self.set.name} has no scored token that spells text at {self.seq_len} tokens"
            )
        loss = nats / tokens
        bits_per_byte = text_nats / (math.log(2) * text_bytes)
        values = {"loss": loss, "perplexity": perplexity(loss), "bpb": bits_per_byte}
        return {f"val/{self.set.name}/{name}@{length_name(self.seq_len)}": value for name, value in values.items()}


def length_name(seq_len: int) -> str:
    """`2k` for 2048, `1000` for 1000."""
    return f"{seq_len // 1024}k" if seq_len % 1024 == 0 else str(seq_len)
