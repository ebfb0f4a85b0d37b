"""The machinery of a round: the filling thread, sums of segments, the agreement of ranks; on a set made by hand."""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from configs.errors import ConfigError
from models.base import CausalLM, LossOutput
from models.batch import IGNORE_INDEX, Batch
from trainer.data.collate import collate
from trainer.data.row import Rows
from trainer.errors import RunError
from trainer.validation import Validation
from trainer.validation import results as results_module
from trainer.validation import scoring as scoring_module
from trainer.validation.filling import filled_ahead
from trainer.validation.results import RoundResults, add_up, segment_sums
from trainer.validation.set_task import SetTask
from trainer.validation.windows import DocumentScores, Pieces, Scores, Windows

VOCAB = 384
TEXT_IDS = torch.arange(VOCAB) >= 2


@dataclass(frozen=True, kw_only=True)
class HandSet:
    """Texts of one window each. Ids 0 and 1 spell nothing, any other spells two bytes."""

    texts: Sequence[Sequence[int]]
    wants_hits: bool = False
    digest: str = "one"
    broken: int | None = None
    """A window that cannot be read."""

    name: str = "hand"
    notes: list[str] = field(default_factory=list)

    @property
    def num_documents(self) -> int:
        return len(self.texts)

    @property
    def num_sequences(self) -> int:
        return len(self.texts)

    def windows(self, seq_len: int) -> Windows:
        count = len(self.texts)
        return Windows(
            sequences=np.arange(count),
            first_labels=np.zeros(count, np.int64),
            num_inputs=np.array([len(text) - 1 for text in self.texts], np.int32),
            num_unscored=np.zeros(count, np.int32),
            prefixed=np.zeros(count, np.bool_),
            left_out={},
        )

    def read(self, windows: Windows, numbers: np.ndarray) -> Pieces:
        if self.broken in numbers:
            raise RunError(f"text {self.broken} is gone")
        texts = [np.array(self.texts[number]) for number in numbers.tolist()]
        return Pieces(
            input_ids=np.concatenate([np.empty(0, np.int64), *(text[:-1] for text in texts)]),
            labels=np.concatenate([np.empty(0, np.int64), *(text[1:] for text in texts)]),
            num_bytes=np.array([2 * int((text[1:] >= 2).sum()) for text in texts], np.int64),
        )

    def metrics(self, scores: Scores) -> dict[str, float]:
        sums = {"nats": scores.nats, "text_nats": scores.text_nats, "hits": scores.hits}
        sums |= {"tokens": scores.num_tokens, "bytes": scores.num_bytes}
        return {name: float(values.sum()) for name, values in sums.items()}

    def documents(self, scores: Scores) -> DocumentScores:
        return DocumentScores(
            documents=np.arange(len(self.texts)),
            nats=scores.nats,
            num_tokens=scores.num_tokens.astype(np.int64),
            num_bytes=scores.num_bytes.astype(np.int64),
            correct=None,
        )


class ByLabel(CausalLM):
    """A label costs the same nats wherever it stands; labels divisible by 3 are the first choice."""

    def __init__(self) -> None:
        super().__init__()
        self.nats = torch.from_numpy(np.random.default_rng(0).exponential(3, VOCAB))
        self.greedy: set[bool] = set()

    def forward(self, batch: Batch, loss_scale: torch.Tensor | None = None, greedy: bool = False) -> LossOutput:
        assert not torch.is_grad_enabled(), "nothing is to be kept for a backward pass"
        self.greedy.add(greedy)
        counted = batch.labels != IGNORE_INDEX
        nats = torch.where(counted, self.nats[batch.labels.clamp(min=0)], 0.0)
        hits = (batch.labels % 3 == 0) & counted
        return LossOutput(loss=nats.sum(), nats=nats, greedy_hits=hits if greedy else None)


def random_texts(count: int) -> list[list[int]]:
    generator = np.random.default_rng(1)
    return [generator.integers(0, VOCAB, generator.integers(2, 17)).tolist() for _ in range(count)]


def validation_of(
    set_: HandSet,
    mesh: Any,
    *,
    micro_batch_tokens: int = 32,
    seq_lens: Sequence[int] = (16,),
    arrays: Path | None = None,
) -> Validation:
    tasks = [
        SetTask(
            set_,
            seq_len=seq_len,
            micro_batch_tokens=micro_batch_tokens,
            text_ids=TEXT_IDS,
        )
        for seq_len in seq_lens
    ]
    return Validation(tasks=tasks, mesh=mesh, pin_memory=False, arrays_dir=arrays)


def validation_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("validation rows")]


def test_sums_of_segments() -> None:
    rows = Rows.empty(2, 4)
    rows.input_ids.fill(5)
    rows.labels[:] = [[7, IGNORE_INDEX, 1, 7], [7, 7, IGNORE_INDEX, IGNORE_INDEX]]
    rows.segment_lengths[:] = [np.array([3, 1]), np.array([2, 2])]
    batch = collate(rows, full_rows=False, pin_memory=False)
    nats = torch.tensor([[1.5, 0.0, torch.nan, 4.0], [0.25, 8.0, 0.0, 0.0]])
    hits = torch.tensor([[True, False, True, False], [True, True, False, False]])
    output = LossOutput(loss=nats.sum(), nats=nats, greedy_hits=hits)
    sums = segment_sums(output, batch, TEXT_IDS)
    assert (sums.dtype, sums.shape) == (torch.float64, (3, 8))
    assert sums[0].isnan().tolist() == [True] + [False] * 7
    assert sums[0, 1:].tolist() == [4.0, 8.25, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert sums[1].tolist() == [1.5, 4.0, 8.25, 0.0, 0.0, 0.0, 0.0, 0.0], "what is no text does not count, NaN or not"
    assert sums[2].tolist() == [2.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    plain = segment_sums(replace(output, greedy_hits=None), batch, None)
    assert plain[1, 1:].tolist() == plain[0, 1:].tolist()
    assert plain[2].tolist() == [0.0] * 8


def test_a_row_costs_the_pairs_that_attend_in_it() -> None:
    task = SetTask(HandSet(texts=random_texts(60)), seq_len=16, micro_batch_tokens=16, text_ids=TEXT_IDS)
    expected = []
    for row in range(len(task.costs)):
        filled = task.fill(np.array([row]))
        lengths = filled.rows.segment_lengths[0][filled.pieces >= 0]
        assert filled.rows.num_padding.tolist() == [16 - lengths.sum()]
        assert (filled.rows.labels[0, lengths.sum() :] == IGNORE_INDEX).all()
        expected.append(sum(length * (length + 1) / 2 for length in lengths.tolist()))
    assert task.costs.tolist() == expected
    assert len(set(expected)) > 5
    assert task.rows_per_forward == 1
    assert (
        SetTask(HandSet(texts=random_texts(9)), seq_len=16, micro_batch_tokens=79, text_ids=TEXT_IDS).rows_per_forward
        == 4
    )


def test_metrics_are_the_same_to_the_last_bit_however_the_rows_are_dealt(make_mesh: Callable[..., Any]) -> None:
    """Field cases R104, R105, R106: ranks, rows of a pass and packing change nothing once the model has spoken."""
    texts, model = random_texts(101), ByLabel()
    labels = np.concatenate([np.array(text[1:]) for text in texts])
    found = []
    for dp_size, micro_batch_tokens, seq_len in ((1, 16, 16), (1, 300, 100), (2, 32, 16), (4, 64, 32), (3, 16, 16)):
        meshes = [make_mesh(rank, dp_size) for rank in range(dp_size)]
        ranks = [
            validation_of(
                HandSet(texts=texts, wants_hits=True), mesh, seq_lens=[seq_len], micro_batch_tokens=micro_batch_tokens
            )
            for mesh in meshes
        ]
        whole = sum((rank.score_own_rows(model)[0] for rank in ranks), np.zeros((101, 5)))
        metrics = ranks[0].metrics([whole])
        found.append({name.removesuffix(f"@{seq_len}"): value for name, value in metrics.items()})
    assert found[0]["val/hand/tokens"] == labels.size
    assert found[0]["val/hand/bytes"] == 2 * (labels >= 2).sum()
    assert found[0]["val/hand/hits"] == (labels % 3 == 0).sum()
    assert found[0]["val/hand/nats"] == pytest.approx(model.nats[labels].sum().item(), rel=1e-14)
    assert found[0]["val/hand/text_nats"] == pytest.approx(model.nats[labels[labels >= 2]].sum().item(), rel=1e-14)
    assert all(other == found[0] for other in found[1:])
    assert model.greedy == {True}


def test_first_choices_are_asked_for_where_a_metric_wants_them(make_mesh: Callable[..., Any]) -> None:
    model = ByLabel()
    metrics = validation_of(HandSet(texts=random_texts(9)), make_mesh()).run(model)
    assert metrics is not None
    assert metrics["val/hand/hits@16"] == 0
    assert model.greedy == {False}


def test_a_row_that_cannot_be_read_ends_the_round(make_mesh: Callable[..., Any]) -> None:
    """The thread's error reaches the caller; the thread has ended then, and the model is in its own mode again."""
    model = ByLabel()
    with pytest.raises(RunError, match=r"^text 20 is gone$"):
        validation_of(HandSet(texts=random_texts(40), broken=20), make_mesh()).run(model)
    assert model.training
    assert validation_threads() == []


def test_a_fault_of_the_model_ends_the_thread_too(make_mesh: Callable[..., Any]) -> None:
    class Faulty(ByLabel):
        def forward(self, batch: Batch, loss_scale: torch.Tensor | None = None, greedy: bool = False) -> LossOutput:
            raise ValueError("no such kernel")

    model = Faulty()
    with pytest.raises(ValueError, match="no such kernel"):
        validation_of(HandSet(texts=random_texts(40)), make_mesh()).run(model)
    assert model.training
    assert validation_threads() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_is_heeded_at_the_same_pass_on_every_rank(make_mesh: Callable[..., Any], rank: int) -> None:
    """The vote comes before each pass, so what ranks agree on there they obey at the same one."""
    votes: list[int] = []
    passes: list[tuple[int, int]] = []

    def leave() -> bool:
        votes.append(len(passes))
        return len(votes) == 4

    model = ByLabel()
    validation = validation_of(HandSet(texts=random_texts(101)), make_mesh(rank, 2))
    assert validation.run(model, lambda *done: passes.append(done), leave=leave) is None
    assert votes == [0, 1, 2, 3]
    assert [done for done, _ in passes] == [1, 2, 3]
    assert model.training
    assert validation_threads() == []


def test_rows_are_filled_by_one_thread_a_little_ahead() -> None:
    made: list[tuple[int, str]] = []

    def fill(key: int) -> int:
        made.append((key, threading.current_thread().name))
        return 10 * key

    taken: list[int] = []
    everything = filled_ahead(fill, (taken.append(key) or key for key in range(50)), ahead=3)
    assert next(everything) == 0
    assert taken == [0, 1, 2, 3]
    everything.close()
    assert len(made) <= 4, "no more than what was asked for, and three more"
    made.clear()
    assert list(filled_ahead(fill, range(50), ahead=3)) == [10 * key for key in range(50)]
    assert [key for key, _ in made] == list(range(50))
    assert len({name for _, name in made}) == 1
    assert threading.current_thread().name not in {name for _, name in made}
    assert list(filled_ahead(fill, [], ahead=3)) == []


def test_an_error_comes_in_its_place() -> None:
    everything = filled_ahead(lambda key: 1 // key, [2, 1, 0, 1], ahead=5)
    assert [next(everything), next(everything)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(everything)
    assert validation_threads() == []


def test_results_are_added_up_in_pieces_of_bounded_size(
    make_mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def all_reduce(values: torch.Tensor) -> None:
        sizes.append(len(values))
        values.mul_(3)

    monkeypatch.setattr(results_module, "_CHUNK_PIECES", 4)
    monkeypatch.setattr(results_module.dist, "all_reduce", all_reduce)
    first, second = np.arange(45.0).reshape(9, 5), np.ones((2, 5))
    add_up([first, second], make_mesh())
    assert sizes == [], "one rank has nothing to add"
    add_up([first, second], replace(make_mesh(), world_size=2))
    assert sizes == [4, 4, 1, 2]
    assert first.tolist() == (3 * np.arange(45.0).reshape(9, 5)).tolist()
    assert second.tolist() == [[3.0] * 5] * 2


def test_few_passes_wait_to_be_read() -> None:
    """The host is four passes ahead of the device at most, however many there are."""
    results, alive = RoundResults([9]), []
    for number in range(9):
        sums = torch.full((3, 8), number + 1.0, dtype=torch.float64)
        alive.append(weakref.ref(sums))
        results.collect(0, sums, pieces=np.array([number]), counts=np.array([[2, 5]]))
        del sums
        assert sum(ref() is not None for ref in alive) == min(number + 1, 4)
    (found,) = results.read()
    assert found.tolist() == [[number + 1.0] * 3 + [2.0, 5.0] for number in range(9)]


def test_ranks_that_see_other_data_are_told_so(make_mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank, before any is scored: a file that is newer on one node, say."""
    texts = random_texts(9)
    shares: list[Any] = []
    monkeypatch.setattr(scoring_module, "agree", lambda mesh, action: shares.append(action()) or shares)
    validation_of(HandSet(texts=texts), make_mesh(0, 2)).agree()
    validation_of(HandSet(texts=texts), make_mesh(1, 2)).agree()
    with pytest.raises(
        ConfigError, match=r"val\.sets: val/hand@16 is not the same on all ranks: rank 2 sees other data"
    ):
        validation_of(HandSet(texts=texts, digest="other"), make_mesh(1, 2)).agree()
    shares[2:] = []
    with pytest.raises(ConfigError, match="val/hand@16 is not the same"):
        validation_of(HandSet(texts=texts[:5]), make_mesh(1, 2)).agree()


def test_single_documents_are_written_by_the_first_rank(make_mesh: Callable[..., Any], tmp_path: Path) -> None:
    texts = random_texts(9)
    for rank in (1, 0):
        mesh = replace(make_mesh(), rank=rank)
        validation = validation_of(HandSet(texts=texts), mesh, seq_lens=[16, 32], arrays=tmp_path)
        metrics = validation.run(ByLabel(), step=70)
        assert metrics is not None
        assert list(tmp_path.glob("*")) == ([] if rank else [tmp_path / "step_70"])
    table = pq.read_table(tmp_path / "step_70" / "hand.parquet").to_pydict()
    assert table["seq_len"] == [16] * 9 + [32] * 9
    assert table["document"] == [*range(9)] * 2
    assert sum(table["nats"][:9]) == pytest.approx(metrics["val/hand/nats@16"], rel=1e-14)
    assert table["tokens"][:9] == [len(text) - 1 for text in texts]
