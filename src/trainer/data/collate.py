"""Rows to a batch: the one place that makes positions, document borders and counts."""

import numpy as np
import torch

from models.batch import IGNORE_INDEX, Batch, Segments
from trainer.data.row import Rows

_MIN_SEGMENTS = 8
_MIN_MAX_SEQLEN = 16


def collate(rows: Rows, *, full_rows: bool, pin_memory: bool) -> Batch:
    """The rows as one batch on the host.

    Args:
        rows: n rows of seq_len; the batch may share their buffers.
        full_rows: the source gives one segment per row.
        pin_memory: page-locked, so that `Batch.to` a GPU does not wait.

    Raises:
        ValueError: segment lengths that are not positive or do not fill their row.
    """
    seq_len = rows.input_ids.shape[1]
    for row, lengths in enumerate(rows.segment_lengths):
        if lengths.size == 0 or int(lengths.min()) < 1 or int(lengths.sum()) != seq_len:
            raise ValueError(f"row {row}: segment lengths {lengths.tolist()} do not fill {seq_len} positions")
    lengths = np.concatenate(rows.segment_lengths).astype(np.int64)
    ends = np.cumsum(lengths)
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    borders = np.concatenate([[0], ends]).astype(np.int32)
    bucket = _power_of_two(lengths.size, _MIN_SEGMENTS)
    cu_seqlens = np.full(bucket + 1, borders[-1])
    cu_seqlens[: borders.size] = borders

    def tensor(array: np.ndarray) -> torch.Tensor:
        made = torch.from_numpy(array)
        return made.pin_memory() if pin_memory else made

    return Batch(
        input_ids=tensor(rows.input_ids),
        labels=tensor(rows.labels),
        position_ids=tensor(positions.reshape(-1, seq_len)),
        segments=Segments(
            cu_seqlens=tensor(cu_seqlens),
            host_cu_seqlens=torch.from_numpy(borders),
            max_seqlen_carrier=torch.empty((_max_seqlen(int(lengths.max()), seq_len), 0)),
            full_rows=full_rows,
        ),
        num_loss_tokens=int((rows.labels != IGNORE_INDEX).sum()),
        num_padding_tokens=int(rows.num_padding.sum()),
        attention_pairs=_pairs(lengths) - _pairs(rows.num_padding),
    )


def _pairs(lengths: np.ndarray) -> int:
    return int((lengths * (lengths + 1) // 2).sum())


def _power_of_two(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())


def _max_seqlen(longest: int, seq_len: int) -> int:
    """A power of two, but no more than the row needs: kernels get work space by it."""
    whole_row = -(-seq_len // _MIN_MAX_SEQLEN) * _MIN_MAX_SEQLEN
    return min(_power_of_two(longest, _MIN_MAX_SEQLEN), whole_row)
