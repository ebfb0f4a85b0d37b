"""State of the loader: exact resume anywhere, refusal of other data, skipped rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.errors import ConfigError
from trainer.data.fake import FakeSource
from trainer.data.loader import RowLoader
from trainer.data.row import RowSource
from trainer.data.stream import RowStream, differences
from trainer.data.tokens import TokensSource

MakeSource = Callable[..., TokensSource]


def _loader(source: RowSource, batch_size: int = 8, dp_rank: int = 0, dp_size: int = 1, workers: int = 0) -> RowLoader:
    return RowLoader(
        source,
        batch_size=batch_size,
        micro_batch_size=2,
        dp_rank=dp_rank,
        dp_size=dp_size,
        num_workers=workers,
        pin_memory=False,
    )


def _state(loader: RowLoader, next_step: int) -> dict[str, Any]:
    return json.loads(json.dumps(loader.state_dict(next_step)))


def _digest(loaders: list[RowLoader], step: int) -> tuple[int, int]:
    parts = [loader.step(step).digest for loader in loaders]
    return sum(part[0] for part in parts) % 2**32, sum(part[1] for part in parts) % 2**32


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_in_the_third_epoch_on_other_ranks(
    tiny_shards: Path, make_source: MakeSource, dp_size: int, workers: int
) -> None:
    """Field cases R57, R58, R59, R62: saved on 2 ranks, resumed on 1, 2 and 4 with other threads: the same rows."""
    source = make_source([tiny_shards], 64)
    before = [_loader(source, dp_rank=rank, dp_size=2) for rank in range(2)]
    start = int(2.5 * source.num_rows) // 8
    undisturbed = [_digest(before, step) for step in range(start, start + 4)]
    states = [_state(loader, start) for loader in before]
    assert states[0] == states[1]
    assert states[0]["epoch"] == 2
    after = [
        _loader(make_source([tiny_shards], 64), dp_rank=rank, dp_size=dp_size, workers=workers)
        for rank in range(dp_size)
    ]
    for loader in after:
        loader.load_state_dict(states[0], start)
    assert [_digest(after, step) for step in range(start, start + 4)] == undisturbed
    for loader in after:
        loader.close()


def test_resume_in_the_middle_of_an_epoch() -> None:
    """Field case R60: 125 steps an epoch, resumed at step 200: epoch 1, row 600, and the same batch."""
    source = FakeSource(seq_len=8, vocab_size=50, seed=0, num_rows=1000, length="variable", input_ids="random")
    undisturbed = _loader(source)
    state = _state(undisturbed, 200)
    assert (state["epoch"], state["index"]) == (1, 600)
    resumed = _loader(source)
    resumed.load_state_dict(state, 200)
    assert resumed.step(200).digest == undisturbed.step(200).digest
    assert resumed.epochs(200) == 1.6


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"document_masking": False}, "document_masking was True and is False"),
        ({"seq_len": 32}, "seq_len was 64 and is 32"),
        ({"tokenizer": {"name": "other"}}, "tokenizer.name was tiny and is other"),
        ({"paths": "heldout"}, "pool.tokens was"),
    ],
)
def test_other_data_is_refused(
    tiny_shards: Path, tiny_heldout: Path, make_source: MakeSource, change: dict[str, Any], named: str
) -> None:
    options: dict[str, Any] = {"seq_len": 64, "tokenizer": {"name": "tiny"}}
    state = _state(_loader(make_source([tiny_shards], **options)), 3)
    paths = [tiny_heldout if change.pop("paths", None) else tiny_shards]
    other = _loader(make_source(paths, **(options | change)))
    with pytest.raises(ConfigError) as caught:
        other.load_state_dict(state, 3)
    assert caught.value.faults[0].key == "resume"
    assert named in caught.value.faults[0].message


def test_digests_are_no_reading_matter() -> None:
    then, now = {"parts": {"1": {"samples": "0a" * 16, "rows": 3}}}, {"parts": {"1": {"samples": "1b" * 16, "rows": 4}}}
    assert differences(then, now) == ["parts.1.rows was 3 and is 4", "parts.1.samples has other contents"]


@pytest.mark.parametrize("lost", ["epoch", "index", "skips", "fingerprint"])
def test_an_incomplete_state_is_refused(lost: str) -> None:
    """Field case R57: nothing goes on without its state."""
    source = FakeSource(seq_len=8, vocab_size=50, seed=0, num_rows=1000, length="fixed", input_ids="random")
    state = _state(_loader(source), 5)
    del state[lost]
    with pytest.raises(ConfigError) as caught:
        _loader(source).load_state_dict(state, 5)
    assert caught.value.faults[0].key == "resume"


@pytest.mark.parametrize("damage", [{"epoch": "x"}, {"index": None}, {"skips": [[1]]}, {"skips": 3}, {"epoch": -1}])
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    source = FakeSource(seq_len=8, vocab_size=50, seed=0, num_rows=1000, length="fixed", input_ids="random")
    state = _state(_loader(source), 5) | damage
    with pytest.raises(ConfigError):
        _loader(source).load_state_dict(state, 5)


def test_another_batch_size_or_step_count_goes_on_at_the_same_row() -> None:
    source = FakeSource(seq_len=8, vocab_size=50, seed=0, num_rows=1000, length="fixed", input_ids="random")
    rows = [row for step in (6, 7) for batch in _loader(source).step(step).micro_batches for row in batch.input_ids]
    state = _state(_loader(source), 6)
    for batch_size, next_step in ((16, 6), (16, 0), (8, 0)):
        other = _loader(source, batch_size=batch_size)
        other.load_state_dict(state, next_step)
        found = [row for batch in other.step(next_step).micro_batches for row in batch.input_ids]
        assert torch.equal(torch.stack(found), torch.stack(rows[:batch_size]))


def test_a_skip_in_the_middle_of_a_larger_step() -> None:
    stream = RowStream(num_rows=7, batch_size=4)
    stream.skip(2, 2)
    larger = RowStream(num_rows=7, batch_size=6)
    larger.load_state_dict(stream.state_dict(1), 5)
    epochs, indices = larger.rows(5, np.arange(6))
    assert (epochs * 7 + indices).tolist() == [4, 5, 6, 7, 12, 13]
    assert larger.position(6) == 14


def _blocks(stream: RowStream, steps: int) -> list[int]:
    """For each step the first of its rows, in units of steps; the others must follow it."""
    first = []
    for step in range(steps):
        epochs, indices = stream.rows(step, np.arange(4))
        positions = epochs * 7 + indices
        assert np.array_equal(positions, positions[0] + np.arange(4))
        assert positions[0] % 4 == 0
        first.append(int(positions[0]) // 4)
    return first


def test_skipped_ranges() -> None:
    stream = RowStream(num_rows=7, batch_size=4)
    stream.skip(5, 6)
    assert _blocks(stream, 8) == [0, 1, 2, 3, 4, 7, 8, 9]
    stream.skip(5, 5)  # again at the same place: the next rows did it too
    assert _blocks(stream, 8) == [0, 1, 2, 3, 4, 8, 9, 10]
    stream.skip(2, 2)
    assert _blocks(stream, 8) == [0, 1, 3, 4, 8, 9, 10, 11]
    stream.skip(3, 4)  # reads blocks 4 and 8: what lies between is skipped already
    assert _blocks(stream, 8) == [0, 1, 3, 9, 10, 11, 12, 13]
    assert stream.state_dict(0)["skips"] == [[8, 12], [16, 36]]
    with pytest.raises(ValueError, match="cannot be skipped"):
        stream.skip(3, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_skips_are_part_of_the_state(workers: int) -> None:
    source = FakeSource(seq_len=8, vocab_size=50, seed=0, num_rows=1000, length="fixed", input_ids="random")
    plain, loader = _loader(source), _loader(source, workers=workers)
    loader.step(3)  # has the next steps on their way
    loader.skip(4, 6)
    rows = [batch.input_ids.tolist() for batch in loader.step(4).micro_batches]
    assert rows == [batch.input_ids.tolist() for batch in plain.step(7).micro_batches]
    state = _state(loader, 5)
    assert (state["epoch"], state["index"], state["skips"]) == (0, 64, [[32, 56]])
    resumed = _loader(source)
    resumed.load_state_dict(state, 5)
    assert resumed.step(5).digest == loader.step(5).digest == plain.step(8).digest
    assert resumed.epochs(5) == 0.064
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_going_back_twice_to_one_checkpoint_keeps_both_skips(workers: int) -> None:
    """The checkpoint's state knows of neither range; one that knows of the first adds nothing."""
    source = FakeSource(seq_len=8, vocab_size=50, seed=0, num_rows=1000, length="fixed", input_ids="random")
    plain, loader = _loader(source), _loader(source, workers=workers)
    state = _state(loader, 4)
    loader.step(5)
    loader.load_state_dict(state, 4)
    loader.skip(5, 6)
    known = _state(loader, 5)
    assert [loader.step(step).digest for step in (4, 5)] == [plain.step(step).digest for step in (4, 7)]
    loader.load_state_dict(state, 4)
    loader.skip(5, 5)
    assert [loader.step(step).digest for step in (4, 5, 6)] == [plain.step(step).digest for step in (4, 8, 9)]
    assert _state(loader, 4)["skips"] == [[40, 64]]
    loader.load_state_dict(known, 5)
    assert loader.step(5).digest == plain.step(8).digest
    loader.close()
