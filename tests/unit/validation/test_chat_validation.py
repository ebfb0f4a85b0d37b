"""`val.data`: conversations scored once each, on a stub model and hand-made rows; and from a file, by the template."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from configs.errors import ConfigError
from configs.renderer import RendererConfig
from configs.validation import ValConfig
from models.base import CausalLM, LossOutput
from models.batch import IGNORE_INDEX, Batch
from models.init import init_weights
from models.registry import build_config, build_model
from trainer.data.chat.build import ChatTools
from trainer.data.collate import collate
from trainer.data.packing import PackedRows, one_each, pack, pack_in_order
from trainer.data.row import Rows, untracked
from trainer.errors import RunError
from trainer.tokenizer import load_tokenizer
from trainer.validation import Validation, build_validation
from trainer.validation import results as results_module
from trainer.validation.chat_task import ChatTask
from trainer.validation.task import padding_rows
from trainer.validation.token_bytes import token_bytes

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
@pytest.mark.parametrize(("dp_size", "rows_per_forward"), [(1, 3), (2, 1), (4, 2)])
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
    shares, passes = [], set()
    for rank in range(dp_size):
        seen: list[tuple[int, int]] = []
        validation = validation_of(
            samples, make_mesh(rank, dp_size), packing=packing, rows_per_forward=rows_per_forward
        )
        shares += validation.score_own_rows(model, lambda *done, seen=seen: seen.append(done))
        assert seen == [(n + 1, len(seen)) for n in range(len(seen))]
        passes.add(len(seen))
    nats, tokens = one_by_one(model, samples)
    assert (np.array([share[:, 3] > 0 for share in shares]).sum(axis=0) == 1).all(), "each row has one owner"
    totals = np.sum(shares, axis=(0, 1))
    assert totals[3] == tokens == 29
    assert totals[0] == pytest.approx(nats, rel=1e-12)
    assert len(passes) == 1
    assert model.shapes == {(rows_per_forward, 16)}


@pytest.mark.parametrize("rows", [[1, -1, 0], [-1, -1, 1], [0, 1, -1]])
def test_rows_of_a_pass_and_padding_in_any_order(rows: list[int]) -> None:
    lengths = np.array([len(ids) for ids, _ in seven_samples()])
    source = PackedSamples(samples=seven_samples(), seq_len=16, rows=pack(lengths, 16))
    filled = ChatTask(source, rows_per_forward=3).fill(np.array(rows))
    pieces, counts = [], []
    for slot, row in enumerate(rows):
        expected = padding_rows(1, 16)
        if row >= 0:
            source.fill(0, np.array([row]), expected)
        assert row >= 0 or (filled.rows.labels[slot] == IGNORE_INDEX).all()
        for name in ("input_ids", "labels", "num_padding"):
            assert getattr(filled.rows, name)[slot].tolist() == getattr(expected, name)[0].tolist()
        (segments,) = expected.segment_lengths
        assert filled.rows.segment_lengths[slot].tolist() == segments.tolist()
        pieces += [row] * len(segments)
        labels = np.split(expected.labels[0], np.cumsum(segments)[:-1])
        counts += [[int((own != IGNORE_INDEX).sum()), 0] for own in labels]
    assert filled.pieces.tolist() == pieces
    assert filled.counts.tolist() == counts


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
    assert [share[0][:, [0, 3]].tolist() for share in own] == [[[1.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [3.0, 1.0]]]
    reductions = []

    def all_reduce(results: torch.Tensor) -> None:
        reductions.append(tuple(results.shape))
        results.copy_(torch.from_numpy(own[0][0] + own[1][0]))

    monkeypatch.setattr(results_module.dist, "all_reduce", all_reduce)
    for mesh in meshes:
        metrics = validation_of(samples, mesh, seq_len=2).run(model)
        assert metrics == {"val/loss": 2.0, "val/perplexity": pytest.approx(math.exp(2))}
    assert reductions == [(2, 5)] * 2


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
    assert validation.notes == ["val.data: 2 forward passes per rank over 7 samples in 7 rows"]


def test_dropout_is_off_and_the_modes_stay(stub_model: Callable[..., Any], make_mesh: Callable[..., Any]) -> None:
    """Adapters and some Hugging Face models have dropout; parts of them may be frozen in evaluation mode."""

    class Dropping(CausalLM):
        def __init__(self) -> None:
            super().__init__()
            self.inner = stub_model(dtype=torch.float64)
            self.dropping = torch.nn.Dropout(0.5)
            self.frozen = torch.nn.Dropout(0.5).eval()

        def forward(self, batch: Batch, loss_scale: torch.Tensor | None = None, greedy: bool = False) -> LossOutput:
            out = self.inner(batch)
            return replace(out, nats=self.frozen(self.dropping(out.nats)))

    model, plain = Dropping(), stub_model(dtype=torch.float64)
    validation = validation_of(seven_samples(), make_mesh())
    assert validation.run(model) == validation.run(plain)
    assert (model.training, model.inner.training, model.dropping.training) == (True, True, True)
    assert not model.frozen.training


@pytest.fixture
def count_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """count_graphs(): compiled so far; compilation ends with the graph, which is what decides about another one."""
    compile_with = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, mode=None, **options: compile_with(function, backend="aot_eager", **options)
    )
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def test_rounds_compile_nothing_anew(make_mesh: Callable[..., Any], count_graphs: Callable[[], int]) -> None:
    """A round has graphs of its own, made once; those of training stay, though it changes modes and pads rows."""
    arch = {"model_type": "llama", "vocab_size": 384, "hidden_size": 16, "intermediate_size": 16}
    arch |= {"num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 64}
    config = build_config(arch, tokenizer_length=300, special_ids={})
    model = build_model(config, seq_len=16, attn="sdpa", dtype=torch.float32)
    init_weights({name: p.detach() for name, p in model.named_parameters()}, std=0.2, seed=0, rules=model.init_rules())
    lengths = np.array([len(ids) for ids, _ in seven_samples()])
    source = PackedSamples(samples=seven_samples(), seq_len=16, rows=pack(lengths, 16))
    task = ChatTask(source, rows_per_forward=3)
    validation = Validation(tasks=[task], mesh=make_mesh(), pin_memory=False)

    def train(first: int) -> None:
        rows = task.fill(np.arange(first, first + 3) % source.num_rows).rows
        model(collate(rows, full_rows=False, pin_memory=False)).loss.backward()

    plain = validation.run(model)
    model.compile_blocks("default", fullgraph=False)
    train(0)
    of_training = count_graphs()
    assert validation.run(model) == pytest.approx(plain, rel=1e-6)
    assert count_graphs() == 2 * of_training
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(3)
        validation.run(model)
        train(1)
    assert count_graphs() == 2 * of_training


CHATS = [
    [("user", "hi"), ("assistant", "yo")],
    [("system", "be brief"), ("user", "2+2?"), ("assistant", "4"), ("user", "3+3?"), ("assistant", "6")],
    [("user", "q"), ("assistant", "long " * 12)],
    [("user", "many " * 16), ("assistant", "no")],
    [("user", "a"), ("assistant", "b")],
    [("user", "name a colour"), ("assistant", "green"), ("user", "another"), ("assistant", "blue")],
    [("user", "x" * 30), ("assistant", "y" * 30)],
]


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where the conversations lie, and what reads them."""

    chats: Path
    tools: ChatTools

    def validation(self, mesh: Any, *, vocab_size: int = 384, **data: Any) -> Validation:
        table = {"name": str(self.chats), "seq_len": 128, "cache_workers": 1} | data
        validation = build_validation(
            ValConfig.model_validate({"interval": 1, "data": table}),
            tokenizer=self.tools.tokenizer,
            vocab_size=vocab_size,
            mesh=mesh,
            pin_memory=False,
            cache_dir=Path("unused"),
            chats=self.tools,
        )
        assert validation is not None
        return validation

    def samples(self) -> list[tuple[list[int], list[bool]]]:
        """Ids and mask of each conversation, as transformers makes them."""
        samples = []
        for chat in CHATS:
            messages = [{"role": role, "content": content} for role, content in chat]
            made = self.tools.tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            samples.append((list(made["input_ids"]), [bool(one) for one in made["assistant_masks"]]))
        return samples


def write_chats(path: Path, chats: Sequence[Sequence[tuple[str, str]]]) -> Path:
    rows = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in chats]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def files(tmp_path: Path, byte_chat_tokenizer: Path) -> Files:
    tools = ChatTools(
        tokenizer=load_tokenizer(str(byte_chat_tokenizer)),
        renderer=RendererConfig(),
        cache_dir=tmp_path / "cache",
        track=untracked,
    )
    return Files(chats=write_chats(tmp_path / "chats.jsonl", CHATS), tools=tools)


@pytest.mark.parametrize("packing", ["best_fit", "sequential", "none"])
def test_conversations_of_a_file_count_once(
    files: Files, stub_model: Callable[..., Any], make_mesh: Callable[..., Any], packing: str
) -> None:
    """Field cases R104, R105: seven conversations on 1, 2 and 4 ranks, against transformers' own ids and masks."""
    model = stub_model(dtype=torch.float64)
    nats, tokens = one_by_one(model, files.samples())
    for dp_size in (1, 2, 4):
        totals = np.zeros(5)
        for rank in range(dp_size):
            validation = files.validation(make_mesh(rank, dp_size), packing=packing, micro_batch_size=2)
            totals += validation.score_own_rows(model)[0].sum(axis=0)
        assert totals[3] == tokens
        assert totals[0] == pytest.approx(nats, rel=1e-12)


@pytest.mark.parametrize("overflow", ["truncate", "split", "drop"])
def test_conversations_longer_than_a_row(
    files: Files, stub_model: Callable[..., Any], make_mesh: Callable[..., Any], overflow: str
) -> None:
    """What is scored of them is what `overflow` says, by hand."""
    seq_len, model = 64, stub_model(dtype=torch.float64)
    nats, tokens = 0.0, 0
    for ids, loss in files.samples():
        for start in range(0, len(ids), seq_len):
            piece = slice(start, start + seq_len)
            ends = min(start + seq_len, len(ids))
            if (overflow == "truncate" and start) or (overflow == "drop" and len(ids) > seq_len):
                continue
            last = min(ends + 1, len(ids)) if overflow == "split" else ends
            labels = np.array(ids[start + 1 : last])
            counted = np.array(loss[start + 1 : last], bool)
            every = model.document_nats(np.array(ids[piece])[: len(labels)], labels)
            nats, tokens = nats + every[counted].sum(), tokens + int(counted.sum())
    metrics = files.validation(make_mesh(), seq_len=seq_len, overflow=overflow).run(model)
    assert metrics == {
        "val/loss": pytest.approx(nats / tokens, rel=1e-12),
        "val/perplexity": pytest.approx(math.exp(nats / tokens)),
    }


def test_faults_name_the_table(files: Files, make_mesh: Callable[..., Any], tmp_path: Path) -> None:
    def fault(**data: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            files.validation(make_mesh(), **data)
        return str(caught.value)

    assert fault(seq_len=64, overflow="error").startswith('val.data.overflow: "error": ')
    assert fault(name=str(tmp_path / "gone.jsonl")).startswith(f"val.data.name: {tmp_path / 'gone.jsonl'} does not")
    empty = write_chats(tmp_path / "empty.jsonl", [[], []])
    assert fault(name=str(empty)).startswith("val.data.name: 0 supervised tokens in 2 conversations: 2 no messages")
    assert "val.data.name" in fault(vocab_size=100)
    with pytest.raises(ConfigError, match=r"tokenizer\.name: .*val\.data need a tokenizer with a chat template"):
        build_validation(
            ValConfig.model_validate({"interval": 1, "data": {"name": str(files.chats)}}),
            tokenizer=None,
            vocab_size=384,
            mesh=make_mesh(),
            pin_memory=False,
            cache_dir=Path("unused"),
        )


def test_a_tokenizer_whose_bytes_cannot_be_counted(
    files: Files, stub_model: Callable[..., Any], make_mesh: Callable[..., Any], tmp_path: Path
) -> None:
    """It scores conversations; only sets need the bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [
        "<|im_end|>",
        "[UNK]",
        *sorted({word for chat in CHATS for _, content in chat for word in content.split()}),
    ]
    backend = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=files.tools.tokenizer.chat_template
    )
    with pytest.raises(ConfigError, match="bits per byte cannot be computed"):
        token_bytes(tokenizer, 384)
    own = replace(files, tools=replace(files.tools, tokenizer=tokenizer))
    metrics = own.validation(make_mesh()).run(stub_model())
    assert metrics is not None
    assert metrics["val/loss"] > 0


def test_sets_and_conversations_in_one_round(
    files: Files,
    stub_model: Callable[..., Any],
    make_mesh: Callable[..., Any],
    tiny_heldout: Path,
    tiny_tokenizer: Path,
) -> None:
    """Each has the numbers that it has alone, the progress counts both, each task has one shape."""
    tokenizer = load_tokenizer(str(tiny_tokenizer))
    tokenizer.chat_template = files.tools.tokenizer.chat_template
    tables = {
        "data": {"name": str(files.chats), "seq_len": 256, "micro_batch_size": 3, "cache_workers": 1},
        "sets": [{"name": "tiny", "path": tiny_heldout}],
    }
    results = []
    for names in (["data"], ["sets"], ["data", "sets"]):
        validation = build_validation(
            ValConfig.model_validate(
                {"interval": 1, "seq_lens": [32], "micro_batch_tokens": 64, **{name: tables[name] for name in names}}
            ),
            tokenizer=tokenizer,
            vocab_size=384,
            mesh=make_mesh(),
            pin_memory=False,
            cache_dir=Path("unused"),
            chats=replace(files.tools, tokenizer=tokenizer),
        )
        assert validation is not None
        model, progress = stub_model(), []
        results.append(validation.run(model, lambda *done, progress=progress: progress.append(done)))
        assert progress == [(n + 1, len(progress)) for n in range(len(progress))]
    assert model.shapes == {(3, 256), (2, 32)}
    chats, sets, both = results
    assert set(chats) == {"val/loss", "val/perplexity"}
    assert both == {**chats, **sets}
