"""The loader: rows of a step depend on the seed and the step, not on ranks, threads or restarts."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.errors import ConfigError
from trainer.data.digest import add_digests, format_digest
from trainer.data.fake import FakeSource
from trainer.data.loader import RowLoader, StepBatches
from trainer.data.row import RowError, Rows, RowSource
from trainer.data.tokens import TokensSource

MakeSource = Callable[..., TokensSource]


def _loader(source: RowSource, **options: object) -> RowLoader:
    settings = {
        "batch_size": 8,
        "micro_batch_size": 2,
        "dp_rank": 0,
        "dp_size": 1,
        "num_workers": 0,
        "pin_memory": False,
    } | options
    return RowLoader(source, **settings)  # type: ignore[arg-type]


def _ids(batches: StepBatches) -> list[list[list[int]]]:
    return [batch.input_ids.tolist() for batch in batches.micro_batches]


class _Counting:
    """A source whose row at (epoch, index) is [1000 * epoch + index, ...]."""

    num_rows = 10
    seq_len = 4
    full_rows = True
    description = "counting"

    def __init__(self, seed: int = 0, bad_row: int | None = None) -> None:
        self.fingerprint = {"type": "counting", "seed": seed}
        self._bad_row = bad_row
        self.filled: list[int] = []
        self.threads: set[int] = set()

    def fill(self, epoch: int, indices: np.ndarray, out: Rows) -> None:
        self.threads.add(threading.get_ident())
        for row, index in enumerate(indices.tolist()):
            name = 1000 * epoch + index
            self.filled.append(name)
            if name == self._bad_row:
                raise RowError(f"row {name} is bad")
            out.input_ids[row] = name
            out.labels[row] = name
            out.segment_lengths[row] = np.array([4])
        out.num_padding[: len(indices)] = 0


def _names(loader: RowLoader, step: int) -> list[int]:
    return [int(row[0]) for batch in loader.step(step).micro_batches for row in batch.input_ids]


def test_where_each_row_goes() -> None:
    """Row i goes to micro-batch m, rank r, slot j with i = m * (ranks * M) + r * M + j."""
    loaders = [_loader(_Counting(), batch_size=8, dp_rank=rank, dp_size=2) for rank in range(2)]
    step = [[batch.input_ids[:, 0].tolist() for batch in loader.step(0).micro_batches] for loader in loaders]
    assert step == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_epochs_follow_each_other() -> None:
    """Field case R49: all ranks pass into the next epoch at the same row, in the middle of a step; none is dropped."""
    loaders = [_loader(_Counting(), batch_size=8, dp_rank=rank, dp_size=4) for rank in range(4)]
    rows = [[name for loader in loaders for name in _names(loader, step)] for step in range(3)]
    assert rows[0] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert rows[1] == [8, 9, 1000, 1001, 1002, 1003, 1004, 1005]
    assert rows[2] == [1006, 1007, 1008, 1009, 2000, 2001, 2002, 2003]
    assert [loaders[0].epochs(step) for step in range(4)] == [0.0, 0.8, 1.6, 2.4]


def test_a_step_of_several_epochs() -> None:
    loader = _loader(_Counting(), batch_size=32, micro_batch_size=32)
    assert _names(loader, 0) == [*range(10), *range(1000, 1010), *range(2000, 2010), 3000, 3001]


@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_threads_change_nothing(tiny_shards: Path, make_source: MakeSource, num_workers: int) -> None:
    """Field case R58: with 0, 2 and 3 threads each row comes once, in the same order."""
    reference = _loader(make_source([tiny_shards], 16, seed=3))
    loader = _loader(make_source([tiny_shards], 16, seed=3), num_workers=num_workers)
    rows = make_source([tiny_shards], 16).num_rows
    seen = []
    for step in range(rows // 8):
        ours, theirs = loader.step(step), reference.step(step)
        assert ours.digest == theirs.digest
        assert _ids(ours) == _ids(theirs)
        seen += [row for batch in ours.micro_batches for row in batch.input_ids.tolist()]
    source = make_source([tiny_shards], 16, seed=3)
    everything = Rows.empty(rows, 16)
    source.fill(0, np.arange(rows), everything)
    assert seen == everything.input_ids[: len(seen)].tolist()
    loader.close()


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 8), (1, 1), (2, 2), (4, 1), (4, 2), (8, 1)])
def test_digest_and_counts_do_not_depend_on_ranks(
    tiny_shards: Path, make_source: MakeSource, dp_size: int, micro_batch_size: int
) -> None:
    source = make_source([tiny_shards], 16)
    reference = _loader(source, batch_size=8, micro_batch_size=4)
    loaders = [
        _loader(source, batch_size=8, micro_batch_size=micro_batch_size, dp_rank=rank, dp_size=dp_size)
        for rank in range(dp_size)
    ]
    for step in (0, 70, 71):
        parts = [loader.step(step) for loader in loaders]
        expected = reference.step(step)
        total = (sum(part.digest[0] for part in parts), sum(part.digest[1] for part in parts))
        assert format_digest(total) == format_digest(expected.digest)
        assert sum(part.num_loss_tokens for part in parts) == expected.num_loss_tokens == 8 * 16


def test_digest_sees_order_ids_labels_and_borders() -> None:
    class Given(_Counting):
        def __init__(self, names: list[int], label: int = 0, lengths: tuple[int, ...] = (4,)) -> None:
            super().__init__()
            self._names, self._label, self._lengths = names, label, np.array(lengths)

        def fill(self, epoch: int, indices: np.ndarray, out: Rows) -> None:
            for row, index in enumerate(indices.tolist()):
                out.input_ids[row] = self._names[index]
                out.labels[row] = self._label
                out.segment_lengths[row] = self._lengths

    sources = [Given([1, 2]), Given([2, 1]), Given([1, 3]), Given([1, 2], label=1), Given([1, 2], lengths=(1, 3))]
    digests = {_loader(source, batch_size=2).step(0).digest for source in sources}
    assert len(digests) == len(sources)
    assert all(0 <= lane < 1 << 32 for digest in digests for lane in digest)


def test_digest_values_are_pinned() -> None:
    """Two versions of the code must call the same rows by the same name."""
    assert format_digest(_loader(_Counting()).step(0).digest) == "48a7d34f4d158cf1"
    assert format_digest((0x1_0000_0001, 0xABC)) == "00000abc00000001"
    assert add_digests((0xFFFFFFFF, 1), (2, 3)) == (1, 4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_step_may_be_asked_for(num_workers: int) -> None:
    loader = _loader(_Counting(), num_workers=num_workers)
    for step in (5, 0, 0, 1, 2, 7, 6):
        expected = [1000 * (p // 10) + p % 10 for p in range(8 * step, 8 * step + 8)]
        assert _names(loader, step) == expected
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_surfaces_as_it_is_and_at_its_step(num_workers: int) -> None:
    loader = _loader(_Counting(bad_row=1003), num_workers=num_workers)
    assert len(loader.step(0).micro_batches) == 4
    for _ in range(2):
        with pytest.raises(RowError, match=r"^row 1003 is bad$"):
            loader.step(1)
    assert _names(loader, 2)[0] == 1006
    loader.close()


def test_what_is_filled_ahead_is_bounded() -> None:
    """Two steps beyond the one asked for, each part filled once."""
    source = _Counting()
    loader = _loader(source, num_workers=2)
    for step in range(5):
        loader.step(step)
    loader.close()
    names = [1000 * (p // 10) + p % 10 for p in range(7 * 8)]
    assert len(set(source.filled)) == len(source.filled)
    assert set(names[: 5 * 8]) <= set(source.filled) <= set(names)
    assert threading.get_ident() not in source.threads


def test_ranks_must_divide_the_batch() -> None:
    with pytest.raises(ConfigError) as caught:
        _loader(_Counting(), batch_size=12, micro_batch_size=2, dp_size=4)
    assert caught.value.faults[0].key == "data.batch_size"
    assert "multiple of 8" in caught.value.faults[0].message


def test_waiting_is_measured_and_batches_are_whole(tiny_shards: Path, make_source: MakeSource) -> None:
    loader = _loader(make_source([tiny_shards], 32), num_workers=1)
    batches = loader.step(0)
    assert batches.wait_seconds > 0
    assert [tuple(batch.input_ids.shape) for batch in batches.micro_batches] == [(2, 32)] * 4
    assert batches.micro_batches[0].num_loss_tokens == 64
    loader.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a GPU")
def test_pinned_batches() -> None:
    source = FakeSource(seq_len=8, vocab_size=9, seed=0, num_rows=99, length="variable", input_ids="random")
    loader = _loader(source, num_workers=1, pin_memory=True)
    batch = loader.step(0).micro_batches[0]
    for tensor in (batch.input_ids, batch.labels, batch.position_ids, batch.segments.cu_seqlens):
        assert tensor.is_pinned()
    loader.close()
