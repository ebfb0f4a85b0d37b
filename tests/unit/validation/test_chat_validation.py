"""`val.data`: conversations scored once each, on a stub model and hand-made rows; and from a file, by the template."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from models.base import CausalLM, LossOutput
from models.batch import IGNORE_INDEX, Batch
from trainer.data.packing import PackedRows, one_each, pack, pack_in_order
from trainer.data.row import Rows
from trainer.errors import RunError
from trainer.validation import Validation
from trainer.validation import scoring as scoring_module
from trainer.validation.chat_task import ChatTask

PACKERS = {"best_fit": pack, "sequential": pack_in_order, "none": lambda lengths, _: one_each(len(lengths))}


@dataclass(frozen=True, kw_only=True)
class PackedSamples:
    """A RowSource of hand-made samples: (ids, which of them carry loss)."""

    samples: Sequence[tuple[list[int], list[bool]]]
    seq_len: int
    rows: PackedRows
    full_rows: bool = False

    @property
    def num_rows(self) -> int:
        return self.rows.num_rows

    @property
    def description(self) -> str:
        return f"{len(self.samples)} samples in {self.num_rows} rows"

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {}

    def fill(self, epoch: int, indices: np.ndarray, out: Rows) -> None:
        assert epoch == 0
        assert len(indices) == len(out.input_ids) > 0
        out.input_ids.fill(0)
        out.labels.fill(IGNORE_INDEX)
        for slot, row in enumerate(indices.tolist()):
            samples = [self.samples[number] for number in self.rows.pieces_of(row)]
            ids = np.concatenate([ids for ids, _ in samples])
            labels = np.concatenate([labels_of(*sample) for sample in samples])
            out.input_ids[slot, : ids.size] = ids
            out.labels[slot, : ids.size] = labels
            padding = self.seq_len - ids.size
            lengths = [len(ids) for ids, _ in samples] + [padding] * (padding > 0)
            out.segment_lengths[slot] = np.array(lengths, np.int64)
            out.num_padding[slot] = padding


def labels_of(ids: list[int], loss: list[bool]) -> np.ndarray:
    return np.append(np.where(loss[1:], ids[1:], IGNORE_INDEX), IGNORE_INDEX)


def seven_samples() -> list[tuple[list[int], list[bool]]]:
    """7 samples of 4 to 12 tokens; of each about the second half carries loss."""
    samples = []
    for number in range(7):
        length = 4 + number + number % 3
        samples.append((list(range(30 * number, 30 * number + length)), [at >= length // 2 for at in range(length)]))
    return samples


def validation_of(
    samples: Sequence[tuple[list[int], list[bool]]],
    mesh: Any,
    *,
    seq_len: int = 16,
    packing: str = "best_fit",
    rows_per_forward: int = 1,
) -> Validation:
    lengths = np.array([len(ids) for ids, _ in samples])
    source = PackedSamples(samples=samples, seq_len=seq_len, rows=PACKERS[packing](lengths, seq_len))
    return Validation(tasks=[ChatTask(source, rows_per_forward=rows_per_forward)], mesh=mesh, pin_memory=False)


def one_by_one(model: Any, samples: Sequence[tuple[list[int], list[bool]]]) -> tuple[float, int]:
    """The definition: nats and number of the loss tokens, one sample at a time."""
    nats, tokens = 0.0, 0
    for ids, loss in samples:
        every = model.document_nats(np.array(ids[:-1]), np.array(ids[1:]))
        nats += every[loss[1:]].sum()
        tokens += sum(loss[1:])
    return nats, tokens


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize(("dp_size", "rows_per_forward"), [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1), (4, 3)])
def test_seven_samples_count_once_however_they_are_dealt(
    stub_model: Callable[..., Any],
    make_mesh: Callable[..., Any],
    dp_size: int,
    rows_per_forward: int,
    packing: str,
) -> None:
    """Field cases R104 and R105: no sample is left out or counted twice on 1, 2 or 4 ranks; micro-batches and packing
    change nothing; every rank runs as many forward passes, of one shape."""
    samples, model = seven_samples(), stub_model(dtype=torch.float64)
    totals, passes = torch.zeros(2, dtype=torch.float64), set()
    for rank in range(dp_size):
        seen: list[tuple[int, int]] = []
        validation = validation_of(
            samples, make_mesh(rank, dp_size), packing=packing, rows_per_forward=rows_per_forward
        )
        totals += validation.score_own_rows(model, lambda *done, seen=seen: seen.append(done))[0]
        assert seen == [(n + 1, len(seen)) for n in range(len(seen))]
        passes.add(len(seen))
    nats, tokens = one_by_one(model, samples)
    assert totals[1].item() == tokens == 29
    assert totals[0].item() == pytest.approx(nats, rel=1e-12)
    assert len(passes) == 1
    assert model.shapes == {(rows_per_forward, 16)}


def test_fp32_is_as_good_as_its_numbers(stub_model: Callable[..., Any], make_mesh: Callable[..., Any]) -> None:
    samples, model = seven_samples(), stub_model()
    losses = []
    for packing, rows_per_forward in (("best_fit", 1), ("sequential", 2), ("none", 7)):
        metrics = validation_of(samples, make_mesh(), packing=packing, rows_per_forward=rows_per_forward).run(model)
        assert metrics is not None
        assert set(metrics) == {"val/loss", "val/perplexity"}
        losses.append(metrics["val/loss"])
    nats, tokens = one_by_one(model, samples)
    assert losses == pytest.approx([nats / tokens] * 3, rel=1e-6)


class ByToken(torch.nn.Module):
    """nats of a label: what `table` says."""

    def __init__(self, table: dict[int, float]) -> None:
        super().__init__()
        self.table = table

    def forward(self, batch: Batch) -> LossOutput:
        values = torch.zeros(batch.labels.shape, dtype=torch.float64)
        for label, nats in self.table.items():
            values[batch.labels == label] = nats
        return LossOutput(loss=values.sum(), nats=values, greedy_hits=None)


def test_the_mean_is_over_tokens(make_mesh: Callable[..., Any]) -> None:
    """Field case R16: sums and tokens of (2, 1) and (90, 9) give 9.2, not the mean of batch means, 6."""
    samples = [([50, 1], [False, True]), ([50, *[2] * 9], [False, *[True] * 9])]
    model = cast(CausalLM, ByToken({1: 2.0, 2: 10.0}))
    metrics = validation_of(samples, make_mesh(), seq_len=10, packing="none").run(model)
    assert metrics == {"val/loss": pytest.approx(9.2, abs=1e-12), "val/perplexity": pytest.approx(math.exp(9.2))}


def test_the_loss_of_all_ranks_is_reported(make_mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case R104: ranks whose shares have a loss of 1 and 3 report 2, both of them, after one reduction."""
    samples = [([50, 1], [False, True]), ([50, 3], [False, True])]
    model = cast(CausalLM, ByToken({1: 1.0, 3: 3.0}))
    meshes = [replace(make_mesh(rank, 2), world_size=2) for rank in range(2)]
    own = [validation_of(samples, mesh, seq_len=2).score_own_rows(model) for mesh in meshes]
    assert [share[0].tolist() for share in own] == [[1.0, 1.0], [3.0, 1.0]]
    reductions = []

    def all_reduce(totals: torch.Tensor) -> None:
        reductions.append(totals.shape)
        totals.copy_(own[0] + own[1])

    monkeypatch.setattr(scoring_module.dist, "all_reduce", all_reduce)
    for mesh in meshes:
        metrics = validation_of(samples, mesh, seq_len=2).run(model)
        assert metrics == {"val/loss": 2.0, "val/perplexity": pytest.approx(math.exp(2))}
    assert reductions == [(1, 2)] * 2


def test_nothing_to_score_is_an_error(make_mesh: Callable[..., Any]) -> None:
    validation = validation_of([([5, 6], [False, False])], make_mesh())
    with pytest.raises(RunError, match=r"val\.data have no token that carries loss"):
        validation.run(cast(CausalLM, ByToken({})))


def test_a_round_that_is_left_has_no_numbers(stub_model: Callable[..., Any], make_mesh: Callable[..., Any]) -> None:
    votes = iter([False, False, True])
    validation = validation_of(seven_samples(), make_mesh(), packing="none")
    assert validation.run(stub_model(), leave=lambda: next(votes)) is None
    assert next(votes, None) is None


def test_the_log_says_what_is_scored(make_mesh: Callable[..., Any]) -> None:
    validation = validation_of(seven_samples(), make_mesh(0, 2), packing="none", rows_per_forward=2)
    assert validation.notes == ["val.data: 7 samples in 7 rows, 2 forward passes per rank"]


def test_dropout_is_off_and_the_modes_stay(stub_model: Callable[..., Any], make_mesh: Callable[..., Any]) -> None:
    """Adapters and some Hugging Face models have dropout; parts of them may be frozen in evaluation mode."""

    class Dropping(CausalLM):
        def __init__(self) -> None:
            super().__init__()
            self.inner = stub_model(dtype=torch.float64)
            self.dropout = torch.nn.Dropout(0.5)
            self.frozen = torch.nn.Dropout(0.5).eval()

        def forward(self, batch: Batch, loss_scale: torch.Tensor | None = None, greedy: bool = False) -> LossOutput:
            out = self.inner(batch)
            return replace(out, nats=self.frozen(self.dropout(out.nats)))

    model, plain = Dropping(), stub_model(dtype=torch.float64)
    validation = validation_of(seven_samples(), make_mesh())
    assert validation.run(model) == validation.run(plain)
    assert (model.training, model.inner.training, model.dropout.training) == (True, True, True)
    assert not model.frozen.training
