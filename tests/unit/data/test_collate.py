"""Rows to a batch: positions, borders, buckets, counts."""

import numpy as np
import pytest
import torch

from trainer.data.collate import collate
from trainer.data.row import Rows


def _rows(segments: list[list[int]], padding: list[int] | None = None, prompt: int = 0) -> Rows:
    """Rows of these segments: ids count up, padding is the last segment, the first `prompt` labels carry no loss."""
    count, seq_len = len(segments), sum(segments[0])
    rows = Rows.empty(count, seq_len)
    rows.input_ids[:] = np.arange(count * seq_len).reshape(count, seq_len)
    rows.labels[:] = rows.input_ids + 1
    rows.labels[:, :prompt] = -100
    rows.segment_lengths = [np.array(lengths) for lengths in segments]
    rows.num_padding[:] = padding or [0] * count
    for row, pad in enumerate(rows.num_padding):
        if pad:
            rows.labels[row, -int(pad) :] = -100
    return rows


def test_borders_strictly_increase_then_repeat() -> None:
    """Field case R09: seq_len 8, documents 4 + 4: no empty segment where a document ends with the row."""
    batch = collate(_rows([[4, 4], [8]]), full_rows=False, pin_memory=False)
    assert batch.segments.cu_seqlens.tolist() == [0, 4, 8, 16, 16, 16, 16, 16, 16]
    assert batch.segments.host_cu_seqlens.tolist() == [0, 4, 8, 16]
    assert batch.segments.cu_seqlens.dtype == batch.segments.host_cu_seqlens.dtype == torch.int32
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]]
    for tensor in (batch.input_ids, batch.labels, batch.position_ids):
        assert (tensor.dtype, tuple(tensor.shape)) == (torch.int64, (2, 8))
    assert not batch.segments.full_rows


def test_borders_come_from_recorded_lengths() -> None:
    """Field case R07: two samples packed: cu_seqlens from the recorded lengths, whatever the ids are."""
    rows = _rows([[5, 11]])
    rows.input_ids[:] = 0
    segments = collate(rows, full_rows=False, pin_memory=False).segments
    assert segments.host_cu_seqlens.tolist() == [0, 5, 16]


@pytest.mark.parametrize(("count", "bucket"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (64, 64), (65, 128)])
def test_segment_buckets(count: int, bucket: int) -> None:
    segments = collate(_rows([[1] * (count - 1) + [129 - count]]), full_rows=False, pin_memory=False).segments
    assert segments.cu_seqlens.shape == (bucket + 1,)
    assert segments.host_cu_seqlens.shape == (count + 1,)
    assert (torch.diff(segments.host_cu_seqlens) > 0).all()
    assert torch.equal(segments.cu_seqlens[: count + 1], segments.host_cu_seqlens)
    assert (segments.cu_seqlens[count:] == 128).all()


@pytest.mark.parametrize(
    ("lengths", "carried"),
    [([3, 5], 16), ([16], 16), ([17, 3], 32), ([32, 100], 128), ([100, 28], 128), ([300], 304), ([255, 45], 256)],
)
def test_longest_segment_is_bucketed(lengths: list[int], carried: int) -> None:
    carrier = collate(_rows([lengths]), full_rows=False, pin_memory=False).segments.max_seqlen_carrier
    assert tuple(carrier.shape) == (carried, 0)


def test_counts() -> None:
    """Field case R107: 40 % padding and 30 % prompt: all, padding and loss tokens are each exact."""
    batch = collate(_rows([[6, 4], [6, 4]], padding=[4, 4], prompt=3), full_rows=False, pin_memory=False)
    assert (batch.num_tokens, batch.num_padding_tokens, batch.num_loss_tokens) == (20, 8, 6)
    assert batch.attention_pairs == 2 * 21


def test_attention_pairs_without_padding() -> None:
    assert collate(_rows([[3, 1, 4]]), full_rows=False, pin_memory=False).attention_pairs == 6 + 1 + 10


@pytest.mark.parametrize("lengths", [[4, 3], [8, 0], [9, -1], []])
def test_lengths_that_do_not_fill_the_row(lengths: list[int]) -> None:
    rows = _rows([[8]])
    rows.segment_lengths = [np.array(lengths, np.int64)]
    with pytest.raises(ValueError, match="row 0: segment lengths"):
        collate(rows, full_rows=False, pin_memory=False)
