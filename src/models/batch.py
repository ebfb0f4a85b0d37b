"""What a model reads: rows of packed documents, and where the documents lie.

Shapes never change from one training batch to the next, so that compiled code is compiled once: ids, labels and
positions are (rows, seq_len), and the document borders are padded to a bucket.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that carries no loss."""


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The documents of a batch, in the flattened (rows * seq_len) order. Padding is a segment of its own.

    `full_rows` says that every row is one segment, whatever the batch: attention is then plain causal attention over
    (rows, seq_len). It is a property of the data source, never of one batch, so that no graph depends on chance.
    """

    cu_seqlens: Tensor
    """(bucket + 1,) int32, on the batch's device: 0, strictly increasing segment ends, then the last end repeated."""

    host_cu_seqlens: Tensor
    """The same numbers without the repeated end, always on the CPU: (segments + 1,) int32."""

    max_seqlen_carrier: Tensor
    """(bucketed length of the longest segment, 0), no storage. The number travels as a *size*, which torch.compile
    keeps symbolic; as an int every new value would compile the block again."""

    full_rows: bool


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch of one rank. Counts are host integers, known before anything runs on the device."""

    input_ids: Tensor
    """(rows, seq_len) int64"""

    labels: Tensor
    """(rows, seq_len) int64, already shifted: labels[i] is the target of position i; IGNORE_INDEX where no loss."""

    position_ids: Tensor
    """(rows, seq_len) int64, restarting at 0 in every segment."""

    segments: Segments

    num_loss_tokens: int
    num_padding_tokens: int
    attention_pairs: int
    """Sum of n (n + 1) / 2 over segments that are not padding: query-key pairs really attended."""

    @property
    def num_tokens(self) -> int:
        """Positions, padding included."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`, copied without waiting (its tensors are pinned when that is a GPU)."""
        segments = replace(
            self.segments,
            cu_seqlens=self.segments.cu_seqlens.to(device, non_blocking=True),
            max_seqlen_carrier=self.segments.max_seqlen_carrier.to(device),
        )
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            segments=segments,
        )
