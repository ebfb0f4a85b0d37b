"""Totals and metrics of held-out sets, on a stub model."""

import gzip
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from configs.errors import ConfigError
from configs.validation import ValConfig
from models.base import LossOutput
from models.batch import IGNORE_INDEX
from trainer.data.shards import TokenPool
from trainer.errors import RunError
from trainer.tokenizer import load_tokenizer
from trainer.validation import Validation, build_validation
from trainer.validation.set_task import length_name
from trainer.validation.token_bytes import token_bytes

VOCAB = 384


class FlatLM(torch.nn.Module):
    """Every token is as likely as any other."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.nats = math.log(vocab_size)

    def forward(self, batch: Any, greedy: bool = False) -> LossOutput:
        nats = self.nats * (batch.labels != IGNORE_INDEX)
        return LossOutput(loss=nats.sum(), nats=nats, greedy_hits=None)


@pytest.fixture
def build(tiny_tokenizer: Path, make_mesh: Callable[..., Any]) -> Callable[..., Validation]:
    def build(path: Path, *, dp_rank: int = 0, dp_size: int = 1, vocab_size: int = VOCAB, **fields: Any) -> Validation:
        config = ValConfig.model_validate(
            {"interval": 1, "sets": [{"name": "set", "path": path}], "seq_lens": [16], **fields}
        )
        validation = build_validation(
            config,
            tokenizer=load_tokenizer(str(tiny_tokenizer)),
            vocab_size=vocab_size,
            mesh=make_mesh(dp_rank, dp_size),
            pin_memory=False,
            cache_dir=Path("unused"),
        )
        assert validation is not None
        return validation

    return build


def documents_of(folder: Path) -> list[np.ndarray]:
    pool = TokenPool([folder])
    return np.split(pool.read(0, pool.num_tokens), pool.document_ends(0, pool.num_tokens))[:-1]


@dataclass(frozen=True, kw_only=True)
class Totals:
    nats: float
    text_nats: float
    hits: float
    tokens: float
    num_bytes: float


def own_totals(validation: Validation, model: Any, task: int = 0) -> Totals:
    nats, text_nats, hits, tokens, num_bytes = validation.score_own_rows(model)[task].sum(axis=0).tolist()
    return Totals(nats=nats, text_nats=text_nats, hits=hits, tokens=tokens, num_bytes=num_bytes)


def plain_windows(document: np.ndarray, seq_len: int, prefix: bool) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Inputs, labels, and how many of the first labels are context."""
    for start in range(0, len(document), seq_len):
        if not prefix:
            window = document[start : start + seq_len]
            yield window[:-1], window[1:], 0
            continue
        tokens = np.append(0, document)  # the EOS of the tiny tokenizer, which has no BOS
        end = min(start + seq_len, len(document))
        first = max(0, end - seq_len) if start else 0
        yield tokens[first:end], tokens[first + 1 : end + 1], start - first


def plain_metrics(model: Any, folder: Path, byte_counts: np.ndarray, seq_len: int, prefix: bool) -> dict[str, float]:
    """The definition: one window of one document at a time, in float64."""
    nats, tokens, text_nats, text_bytes = 0.0, 0, 0.0, 0
    for document in documents_of(folder):
        for inputs, all_labels, context in plain_windows(document, seq_len, prefix):
            if not len(all_labels):
                continue
            labels, window_nats = all_labels[context:], model.document_nats(inputs, all_labels)[context:]
            nats += window_nats.sum()
            tokens += len(labels)
            text_nats += window_nats[byte_counts[labels] > 0].sum()
            text_bytes += byte_counts[labels].sum()
    loss = nats / tokens
    return {"loss": loss, "perplexity": math.exp(loss), "bpb": text_nats / math.log(2) / text_bytes}


@pytest.mark.parametrize("context", ["none", "prefix"])
@pytest.mark.parametrize("seq_len", [7, 64])
def test_equals_one_document_at_a_time(
    build: Callable[..., Validation],
    stub_model: Callable[..., Any],
    tiny_heldout: Path,
    tiny_tokenizer: Path,
    context: str,
    seq_len: int,
) -> None:
    """Field case R106: packing and padding of documents of mixed lengths change no likelihood."""
    metrics = build(tiny_heldout, context=context, seq_lens=[seq_len], micro_batch_tokens=200).run(stub_model())
    byte_counts = token_bytes(load_tokenizer(str(tiny_tokenizer)), VOCAB)
    expected = plain_metrics(stub_model(), tiny_heldout, byte_counts, seq_len, context == "prefix")
    assert metrics == {f"val/set/{name}@{seq_len}": pytest.approx(value, rel=1e-5) for name, value in expected.items()}


def test_bytes_are_those_of_the_text_without_the_first_tokens(
    build: Callable[..., Validation], stub_model: Callable[..., Any], tiny_heldout: Path, tiny_tokenizer: Path
) -> None:
    tokenizer = load_tokenizer(str(tiny_tokenizer))
    documents = documents_of(tiny_heldout)
    text_bytes = sum(len(str(tokenizer.decode(d, skip_special_tokens=True)).encode()) for d in documents)
    byte_counts = token_bytes(tokenizer, VOCAB)
    first_bytes = int(sum(byte_counts[document[::16]].sum() for document in documents))
    num_tokens = sum(map(len, documents))

    whole = own_totals(build(tiny_heldout, context="prefix"), stub_model())
    assert (whole.tokens, whole.num_bytes) == (num_tokens, text_bytes)
    rest = own_totals(build(tiny_heldout, context="none"), stub_model())
    assert rest.tokens == num_tokens - sum(len(document[::16]) for document in documents)
    assert rest.num_bytes == text_bytes - first_bytes


def test_loss_is_over_tokens_not_over_batches(
    build: Callable[..., Validation], write_shard: Callable[..., Path]
) -> None:
    """Field case R16: sums and tokens of (2, 1) and (90, 9) give 9.2, not the mean of batch means, 6."""

    class ByLabel(torch.nn.Module):
        def forward(self, batch: Any) -> LossOutput:
            values = torch.where(batch.labels == 0, 2.0, 10.0) * (batch.labels != IGNORE_INDEX)
            return LossOutput(loss=values.sum(), nats=values, greedy_hits=None)

    folder = write_shard([[0], list(range(50, 59))])
    # one row of nine positions per forward pass: each document has its own
    validation = build(folder, seq_lens=[9], micro_batch_tokens=9, context="prefix")
    metrics = validation.run(ByLabel())  # type: ignore[arg-type]
    assert metrics["val/set/loss@9"] == pytest.approx(9.2, abs=1e-12)
    assert metrics["val/set/perplexity@9"] == pytest.approx(math.exp(9.2))


def test_special_tokens_count_in_the_loss_and_not_in_bpb(
    build: Callable[..., Validation], write_shard: Callable[..., Path], stub_model: Callable[..., Any]
) -> None:
    folder = write_shard([[40, 1, 41, 0], [42, 0]])
    totals = own_totals(build(folder, context="none"), stub_model())
    long = stub_model().document_nats(np.array([40, 1, 41]), np.array([1, 41, 0]))
    short = stub_model().document_nats(np.array([42]), np.array([0]))
    assert (totals.tokens, totals.num_bytes) == (4, 1)
    assert totals.nats == pytest.approx(long.sum() + short.sum(), rel=1e-6)
    assert totals.text_nats == pytest.approx(long[1], rel=1e-6)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_seven_documents_on_any_number_of_ranks(
    build: Callable[..., Validation], write_shard: Callable[..., Path], stub_model: Callable[..., Any], dp_size: int
) -> None:
    """Field cases R104 and R105: every window is scored by one rank; none is left out or scored twice."""
    folder = write_shard([[*range(10 + n, 20 + 2 * n), 0] for n in range(7)])
    model = stub_model(dtype=torch.float64)
    shares, passes = [], set()
    for rank in range(dp_size):
        seen: list[tuple[int, int]] = []
        validation = build(folder, dp_rank=rank, dp_size=dp_size, micro_batch_tokens=32)
        shares += validation.score_own_rows(model, lambda *done, seen=seen: seen.append(done))
        passes.add(len(seen))
        assert seen == [(n + 1, len(seen)) for n in range(len(seen))]
    assert len(passes) == 1, "every rank runs as many forward passes as the others"
    windows = [
        window for document in documents_of(folder) for window in (document[:16], document[16:]) if len(window) > 1
    ]
    assert (np.array([share[:, 3] > 0 for share in shares]).sum(axis=0) == 1).all(), "each window has one owner"
    whole = np.sum(shares, axis=0)
    assert whole[:, 3].tolist() == [len(window) - 1 for window in windows]
    nats = [model.document_nats(window[:-1], window[1:]).sum() for window in windows]
    assert whole[:, 0] == pytest.approx(nats, rel=1e-12)


def test_micro_batch_tokens_changes_nothing(
    build: Callable[..., Validation], stub_model: Callable[..., Any], tiny_heldout: Path
) -> None:
    results = []
    for micro_batch_tokens in (64, 200, 5000):
        model = stub_model()
        results.append(build(tiny_heldout, seq_lens=[32, 64], micro_batch_tokens=micro_batch_tokens).run(model))
        assert model.shapes == {(micro_batch_tokens // 32, 32), (micro_batch_tokens // 64, 64)}, "one shape per length"
    assert len(results[0]) == 6
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-6)


def test_targets_that_the_loss_file_takes_out_are_not_scored(
    build: Callable[..., Validation], write_shard: Callable[..., Path], stub_model: Callable[..., Any]
) -> None:
    folder = write_shard([[40, 41, 42, 0], [43, 44, 0]], loss=[1, 0, 1, 1, 1, 1, 0])
    none = own_totals(build(folder), stub_model())
    assert (none.tokens, none.num_bytes) == (3, 2)
    first = stub_model().document_nats(np.array([40, 41, 42]), np.array([41, 42, 0]))
    second = stub_model().document_nats(np.array([43, 44]), np.array([44, 0]))
    assert none.nats == pytest.approx(first[1] + first[2] + second[0], rel=1e-6)
    assert own_totals(build(folder, context="prefix"), stub_model()).tokens == 5


def test_nothing_left_to_score_is_an_error(
    build: Callable[..., Validation], write_shard: Callable[..., Path], stub_model: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match="set has nothing to score at 16 tokens: 2 left out: too short to score"):
        build(write_shard([[0], [0]], "short"))
    with pytest.raises(RunError, match="val/set@16: no token was scored"):
        build(write_shard([[40, 41, 0]], "masked", loss=[1, 0, 0])).run(stub_model())


def test_documents_too_short_to_score_are_counted(
    build: Callable[..., Validation], write_shard: Callable[..., Path]
) -> None:
    folder = write_shard([[0], [40, 0], [0]])
    assert build(folder).notes == [
        "val/set@16: 1 forward passes per rank over 1 windows of 3 documents in 1 rows (2 left out: too short to score)"
    ]
    assert build(folder, context="prefix").notes == [
        "val/set@16: 1 forward passes per rank over 3 windows of 3 documents in 1 rows"
    ]


def test_shards_of_another_tokenizer_are_refused(
    build: Callable[..., Validation], write_shard: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match="ends with token 7") as caught:
        build(write_shard([[40, 7], [41, 7]]))
    assert caught.value.faults[0].key == "val.sets"


def test_ids_beyond_the_vocabulary_are_named(
    build: Callable[..., Validation], write_shard: Callable[..., Path], stub_model: Callable[..., Any]
) -> None:
    folder = write_shard([[40, 0], [41, 500, 0]])
    with pytest.raises(RunError, match=r"00000_00000_doc_shuffled\.ds: token 3 has id 500, .* vocabulary has 384"):
        build(folder).run(stub_model())


def test_a_folder_without_a_set_is_refused(build: Callable[..., Validation], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"val\.sets: .* holds no file that ends with"):
        build(tmp_path)
    with pytest.raises(ConfigError, match=r"val\.sets: .*absent is neither a file nor a folder"):
        build(tmp_path / "absent")


@pytest.fixture
def build_named(
    tiny_tokenizer: Path, make_mesh: Callable[..., Any], tmp_path: Path
) -> Callable[[Path, list[str]], Validation]:
    """Sets by name in a folder."""

    def build_named(data_dir: Path, names: list[str]) -> Validation:
        validation = build_validation(
            ValConfig.model_validate({"data_dir": data_dir, "sets": names, "seq_lens": [1024]}),
            tokenizer=load_tokenizer(str(tiny_tokenizer)),
            vocab_size=VOCAB,
            mesh=make_mesh(),
            pin_memory=False,
            cache_dir=tmp_path / "cache",
        )
        assert validation is not None
        return validation

    return build_named


def test_sets_by_name_lie_in_data_dir(
    build_named: Callable[..., Validation],
    write_shard: Callable[..., Path],
    stub_model: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """As a folder or as a file of rows."""
    write_shard([[40, 41, 0]], "shards")
    (tmp_path / "rows.jsonl").write_text('{"text": "some words"}\n')
    with gzip.open(tmp_path / "zipped.jsonl.gz", "wt") as file:
        file.write('{"context": "some", "continuation": " words"}\n')
    metrics = build_named(tmp_path, ["shards", "rows", "zipped"]).run(stub_model())
    assert set(metrics or {}) == {
        *(f"val/{name}/{metric}@1k" for name in ("shards", "rows") for metric in ("loss", "perplexity", "bpb")),
        *(f"val/zipped/{metric}@1k" for metric in ("loss", "bpb", "acc")),
    }


def test_every_set_that_cannot_be_used_is_named(
    build_named: Callable[..., Validation], write_shard: Callable[..., Path], tmp_path: Path
) -> None:
    write_shard([[40, 41, 0]], "good")
    write_shard([[0], [0]], "short")
    write_shard([[40, 0]], "twice")
    (tmp_path / "twice.parquet").touch()
    with pytest.raises(ConfigError) as caught:
        build_named(tmp_path, ["absent", "good", "short", "twice"])
    assert [(fault.key, fault.message) for fault in caught.value.faults] == [
        (
            "val.sets",
            f"{tmp_path} holds no set 'absent': nothing there is called absent, absent.jsonl, absent.jsonl.gz, "
            "absent.json, absent.parquet",
        ),
        ("val.sets", "short has nothing to score at 1024 tokens: 2 left out: too short to score"),
        (
            "val.sets",
            f"'twice' is unclear: there are {tmp_path / 'twice'} and {tmp_path / 'twice.parquet'}; give {{name, path}}",
        ),
    ]


def test_a_fault_that_sets_share_is_told_once(build_named: Callable[..., Validation], tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "the cat"}\n')
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigError) as caught:
        build_named(tmp_path, ["one", "two"])
    assert [fault.key for fault in caught.value.faults] == ["val.cache_dir"]


def test_a_set_has_its_own_lengths_and_number_of_documents(
    build: Callable[..., Validation], write_shard: Callable[..., Path], stub_model: Callable[..., Any]
) -> None:
    folder = write_shard([[40 + n, 41 + n, 0] for n in range(9)])
    sets = [{"name": "all", "path": folder}, {"name": "two", "path": folder, "seq_lens": [8, 32], "max_documents": 2}]
    validation = build(folder, sets=sets)
    assert [note.split(" in ")[0] for note in validation.notes] == [
        "val/all@16: 1 forward passes per rank over 9 windows of 9 documents",
        "val/two@8: 1 forward passes per rank over 2 windows of 2 documents",
        "val/two@32: 1 forward passes per rank over 2 windows of 2 documents",
    ]
    model = stub_model(dtype=torch.float64)
    metrics = validation.run(model)
    first = [model.document_nats(np.array([40 + n, 41 + n]), np.array([41 + n, 0])) for n in range(2)]
    assert metrics is not None
    assert metrics["val/two/loss@32"] == pytest.approx(np.mean(first), rel=1e-12)
    assert metrics["val/two/loss@8"] == metrics["val/two/loss@32"]


def test_no_table_no_validation(make_mesh: Callable[..., Any]) -> None:
    nothing = build_validation(
        None, tokenizer=None, vocab_size=8, mesh=make_mesh(), pin_memory=False, cache_dir=Path("unused")
    )
    assert nothing is None


def test_lengths_have_short_names() -> None:
    assert [length_name(n) for n in (256, 512, 1000, 1024, 2048, 3000, 8192)] == [
        "256",
        "512",
        "1000",
        "1k",
        "2k",
        "3000",
        "8k",
    ]


def test_the_model_keeps_its_mode_and_gets_no_gradient(
    build: Callable[..., Validation], stub_model: Callable[..., Any], tiny_heldout: Path
) -> None:
    model = stub_model()
    before = model.embedding.detach().clone()
    build(tiny_heldout).run(model)
    assert model.training
    assert model.embedding.grad is None
    assert torch.equal(model.embedding, before)


@pytest.mark.parametrize(
    ("context", "begins", "expected"),
    [
        ("none", False, [[5], [7]]),
        ("none", True, [[5], [7]]),
        ("prefix", False, [[5], [1, 7]]),
        ("prefix", True, [[1, 5], [1, 7]]),
    ],
)
def test_what_a_model_reads_before_scored_tokens(
    make_mesh: Callable[..., Any], tmp_path: Path, context: str, begins: bool, expected: list[list[int]]
) -> None:
    """A text with a context and one without: nothing stands before them with "none", though the tokenizer begins texts
    with BOS; with "prefix" it stands where it is needed, or where the tokenizer would put it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, "<bos>": 1} | {letter: number for number, letter in enumerate(letters, 2)}
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<eos>", "<bos>"])
    if begins:
        raw.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<bos>", eos_token="<eos>")
    rows = [{"context": "$", "continuation": "%"}, {"context": "", "continuation": "&'"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert tokenizer.encode("$", add_special_tokens=False) == [5]
    read: list[list[int]] = []

    class Reader(torch.nn.Module):
        def forward(self, batch: Any, greedy: bool = False) -> LossOutput:
            ids = batch.input_ids.flatten().tolist()
            read.extend(ids[start:end] for start, end in pairwise(batch.segments.host_cu_seqlens.tolist()))
            nats = torch.zeros(batch.labels.shape)
            return LossOutput(loss=nats.sum(), nats=nats, greedy_hits=nats > 0)

    validation = build_validation(
        ValConfig.model_validate(
            {"sets": [{"name": "set", "path": path}], "seq_lens": [2], "micro_batch_tokens": 8, "context": context}
        ),
        tokenizer=tokenizer,
        vocab_size=VOCAB,
        mesh=make_mesh(),
        pin_memory=False,
        cache_dir=tmp_path / "cache",
    )
    assert validation is not None
    validation.run(Reader())  # type: ignore[arg-type]
    assert sorted(ids for ids in read if any(ids)) == sorted(expected)


def test_a_prefix_takes_a_token_that_the_model_knows(
    make_mesh: Callable[..., Any], write_shard: Callable[..., Path], tmp_path: Path
) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<eos>"])
    suite = {"sets": [{"name": "set", "path": write_shard([[40, 41]])}], "seq_lens": [16], "context": "prefix"}
    for eos, vocab_size, message in (
        (None, 300, r'val\.context: "prefix" takes a BOS or EOS token, and the tokenizer has neither'),
        ("<eos>", 256, r'val\.context: "prefix" takes token 256 of the tokenizer, but the model\'s vocabulary has 256'),
    ):
        with pytest.raises(ConfigError, match=message):
            build_validation(
                ValConfig.model_validate(suite),
                tokenizer=PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=eos),
                vocab_size=vocab_size,
                mesh=make_mesh(),
                pin_memory=False,
                cache_dir=tmp_path / "cache",
            )


def test_rows_and_shards_after_a_prefix_where_the_tokenizer_puts_a_space_before_texts(
    make_mesh: Callable[..., Any], write_shard: Callable[..., Path], tmp_path: Path
) -> None:
    """Shards do not say where that space is, so their bytes cannot be counted; of rows it is known."""
    raw = Tokenizer(
        models.BPE({"<s>": 256, "▁": 257} | {f"<0x{n:02X}>": n for n in range(256)}, [], byte_fallback=True)
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")
    shards, path = write_shard([[257, 97, 98]], "shards"), tmp_path / "rows.jsonl"
    path.write_text('{"text": "ab"}\n{"text": "abcd"}\n{"text": "abcdef"}\n')
    keys = {"tokenizer": tokenizer, "vocab_size": 258, "pin_memory": False, "cache_dir": tmp_path / "unused"}

    def build(context: str, name: str, set_: Path) -> Validation | None:
        suite = {"context": context, "seq_lens": [16], "micro_batch_tokens": 16, "cache_dir": tmp_path / "used"}
        suite["sets"] = [{"name": name, "path": set_, "max_documents": 2}]
        return build_validation(ValConfig.model_validate(suite), mesh=make_mesh(), **keys)

    with pytest.raises(ConfigError, match=r"val\.context: .* a space before every text, and the shards of kept do not"):
        build("prefix", "kept", shards)
    assert build("none", "kept", shards) is not None
    validation = build("prefix", "rows", path)
    assert validation is not None
    assert validation.score_own_rows(FlatLM(258))[0][:, 3:].tolist() == [[3, 2], [5, 4]]  # type: ignore[arg-type]
    metrics = validation.run(FlatLM(258))  # type: ignore[arg-type]
    assert metrics is not None
    assert metrics["val/rows/bpb@16"] == pytest.approx(math.log2(258) * 8 / 6, rel=1e-6)
    assert (tmp_path / "used").exists() and not (tmp_path / "unused").exists()


def test_ranks_agree_before_the_first_round(
    build: Callable[..., Validation], write_shard: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    agreed: list[Validation] = []
    monkeypatch.setattr(Validation, "agree", lambda self: agreed.append(self))
    validation = build(write_shard([[40, 41, 0]]))
    assert agreed == [validation]
