"""Totals and metrics of held-out token folders, on a stub model."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
        )
        assert validation is not None
        return validation

    return build


def documents_of(folder: Path) -> list[np.ndarray]:
    pool = TokenPool([folder])
    return np.split(pool.read(0, pool.num_tokens), pool.document_ends(0, pool.num_tokens))[:-1]


def plain_metrics(model: Any, folder: Path, byte_counts: np.ndarray, seq_len: int, prefix: bool) -> dict[str, float]:
    """The definition: one window of one document at a time, in float64."""
    nats, tokens, text_nats, text_bytes = 0.0, 0, 0.0, 0
    for document in documents_of(folder):
        for start in range(0, len(document), seq_len):
            window = document[start : start + seq_len]
            inputs, labels = (np.append(0, window[:-1]), window) if prefix else (window[:-1], window[1:])
            if not len(labels):
                continue
            window_nats = model.document_nats(inputs, labels)
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

    whole = build(tiny_heldout, context="prefix").score_own_rows(stub_model())[0]
    assert whole[[1, 3]].tolist() == [num_tokens, text_bytes]
    rest = build(tiny_heldout, context="none").score_own_rows(stub_model())[0]
    assert rest[[1, 3]].tolist() == [num_tokens - sum(len(d[::16]) for d in documents), text_bytes - first_bytes]


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
    nats, tokens, text_nats, text_bytes = build(folder, context="none").score_own_rows(stub_model())[0].tolist()
    long = stub_model().document_nats(np.array([40, 1, 41]), np.array([1, 41, 0]))
    short = stub_model().document_nats(np.array([42]), np.array([0]))
    assert (tokens, text_bytes) == (4, 1)
    assert nats == pytest.approx(long.sum() + short.sum(), rel=1e-6)
    assert text_nats == pytest.approx(long[1], rel=1e-6)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_seven_documents_on_any_number_of_ranks(
    build: Callable[..., Validation], write_shard: Callable[..., Path], stub_model: Callable[..., Any], dp_size: int
) -> None:
    """Field cases R104 and R105: the sums of all ranks are those of the set, with no document left out or twice."""
    folder = write_shard([[*range(10 + n, 20 + 2 * n), 0] for n in range(7)])
    model = stub_model(dtype=torch.float64)
    totals, passes = torch.zeros(4, dtype=torch.float64), set()
    for rank in range(dp_size):
        seen: list[tuple[int, int]] = []
        validation = build(folder, dp_rank=rank, dp_size=dp_size, micro_batch_tokens=32)
        totals += validation.score_own_rows(model, lambda *done, seen=seen: seen.append(done))[0]
        passes.add(len(seen))
        assert seen == [(n + 1, len(seen)) for n in range(len(seen))]
    assert len(passes) == 1, "every rank runs as many forward passes as the others"
    byte_counts = token_bytes_of_ids(folder)
    assert totals[1] == byte_counts
    nats = sum(
        model.document_nats(window[:-1], window[1:]).sum()
        for document in documents_of(folder)
        for window in (document[:16], document[16:])
        if len(window) > 1
    )
    assert totals[0].item() == pytest.approx(nats, rel=1e-12)


def token_bytes_of_ids(folder: Path) -> int:
    """Tokens of the folder that come after another one in their window of 16."""
    return sum(len(document) - len(document[::16]) for document in documents_of(folder))


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
    none = build(folder).score_own_rows(stub_model())[0]
    assert none[[1, 3]].tolist() == [3, 2]
    first = stub_model().document_nats(np.array([40, 41, 42]), np.array([41, 42, 0]))
    second = stub_model().document_nats(np.array([43, 44]), np.array([44, 0]))
    assert none[0].item() == pytest.approx(first[1] + first[2] + second[0], rel=1e-6)
    assert build(folder, context="prefix").score_own_rows(stub_model())[0, 1] == 5


def test_nothing_left_to_score_is_an_error(
    build: Callable[..., Validation], write_shard: Callable[..., Path], stub_model: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match="no document of set is long enough"):
        build(write_shard([[0], [0]], "short"))
    with pytest.raises(RunError, match="held-out set set has no scored token that spells text at 16 tokens"):
        build(write_shard([[40, 41, 0]], "masked", loss=[1, 0, 0])).run(stub_model())


def test_documents_too_short_to_score_are_counted(
    build: Callable[..., Validation], write_shard: Callable[..., Path]
) -> None:
    folder = write_shard([[0], [40, 0], [0]])
    assert build(folder).notes == [
        "val/set@16: 1 forward passes per rank over 1 windows of 3 documents in 1 rows "
        "(2 documents are too short to score)"
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


def test_a_folder_without_shards_is_refused(build: Callable[..., Validation], tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="not a folder of token shards"):
            build(path)


def test_sets_by_name_lie_in_data_dir(
    tiny_tokenizer: Path, tiny_heldout: Path, make_mesh: Callable[..., Any], stub_model: Callable[..., Any]
) -> None:
    config = ValConfig(interval=1, data_dir=tiny_heldout.parent, sets=[tiny_heldout.name], seq_lens=[1024])
    validation = build_validation(
        config,
        tokenizer=load_tokenizer(str(tiny_tokenizer)),
        vocab_size=VOCAB,
        mesh=make_mesh(),
        pin_memory=False,
    )
    assert validation is not None
    assert set(validation.run(stub_model())) == {
        f"val/{tiny_heldout.name}/{metric}@1k" for metric in ("loss", "perplexity", "bpb")
    }


def test_no_table_no_validation(make_mesh: Callable[..., Any]) -> None:
    assert build_validation(None, tokenizer=None, vocab_size=8, mesh=make_mesh(), pin_memory=False) is None


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
