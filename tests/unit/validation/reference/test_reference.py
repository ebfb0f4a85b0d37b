"""Every kind of held-out set, both contexts, three kinds of tokenizers: metrics and records of documents as the plain
reference of conftest.py has them. Counts of tokens and bytes are exact."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.base import CausalLM
from trainer.tokenizer import load_tokenizer
from trainer.validation import Validation

WORDS = ("the", "a", "dog", "i love borzois! 🐕", "naïve", "東京", "été", "x = 10 ** 23", "\n\t", "  ", "🐕🐕", "")
TOKENIZERS = ("byte_level", "bytes", "sentencepiece")
SEQ_LENS = [16, 48]


def some_text(generator: np.random.Generator, most_words: int) -> str:
    return " ".join(generator.choice(WORDS, generator.integers(1, most_words + 1)))


def texts() -> list[dict[str, Any]]:
    """Of one token to several windows; some tokenizers make one token of the first two."""
    generator = np.random.default_rng(0)
    rows = [{"text": "a"}, {"text": "the", "id": 7}, {"text": " starts with a space"}]
    return rows + [{"text": text} for _ in range(14) if (text := some_text(generator, 20)).strip()]


def continuations() -> list[dict[str, Any]]:
    """Contexts that are empty, end with spaces, or are longer than a window; borders beside and inside of words."""
    generator = np.random.default_rng(1)
    rows = [
        {"context": "", "continuation": "dog the a"},
        {"context": "the dog ", "continuation": "a"},
        {"context": "the dog \n ", "continuation": "🐕"},
        {"context": "i love b", "continuation": "orzois! 🐕"},
        {"context": "a" * 60, "continuation": " the end"},
        {"context": "東", "continuation": "京 the " * 20},
    ]
    for _ in range(10):
        rows.append({"context": some_text(generator, 12), "continuation": f" {some_text(generator, 2)}dog"})
    return rows


def pairs(*, with_context: bool) -> list[dict[str, Any]]:
    generator = np.random.default_rng(2)
    rows = []
    for _ in range(12):
        row = {"chosen": f" {some_text(generator, 3)}x", "rejected": f" {some_text(generator, 3)}dog"}
        rows.append({"context": some_text(generator, 9), **row} if with_context else row)
    return [*rows, {"chosen": " the same", "rejected": " the same"}]  # not right


def choices() -> list[dict[str, Any]]:
    generator = np.random.default_rng(3)
    rows = []
    for _ in range(14):
        options = [f" {some_text(generator, 2)}x{number}" for number in range(generator.integers(2, 6))]
        row = {"context": some_text(generator, 9), "choices": options}
        rows.append(row | {"answer": int(generator.integers(len(options)))})
    # Of two equal options the first one is the model's.
    return [*rows, {"context": "a", "choices": [" dog", " dog"], "answer": 1}]


SETS = {
    "texts": texts(),
    "continuations": continuations(),
    "pairs": pairs(with_context=True),
    "bare": pairs(with_context=False),
    "choices": choices(),
}


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest) -> Any:
    match request.param:
        case "byte_level":
            return load_tokenizer(str(request.getfixturevalue("tiny_tokenizer")))
        case "bytes":
            return load_tokenizer(str(request.getfixturevalue("byte_chat_tokenizer")))
        case _:
            return request.getfixturevalue("sentencepiece_tokenizer")


def expected_metrics(plain: Any, reference: Any) -> dict[str, float]:
    """By the names that metrics have, without the length."""
    by_set = {
        "texts": plain.text_metrics([reference.text(row["text"]) for row in SETS["texts"]]),
        "continuations": plain.continuation_metrics(
            [reference.continuation(row["context"], row["continuation"]) for row in SETS["continuations"]]
        ),
        **{name: plain.option_metrics(SETS[name], reference) for name in ("pairs", "bare", "choices")},
    }
    return {f"val/{name}/{metric}": value for name, found in by_set.items() for metric, value in found.items()}


def assert_metrics(found: dict[str, float], expected: dict[str, float], *, rel: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if "/acc" in name:
            assert found[name] == pytest.approx(value, abs=1e-12), name  # a share of documents: the same ones
        else:
            assert found[name] == pytest.approx(value, rel=rel, abs=rel), name


@pytest.mark.parametrize("tokenizer", TOKENIZERS, indirect=True)
@pytest.mark.parametrize("context", ["none", "prefix"])
def test_all_metrics_equal_the_reference(
    plain: Any,
    tokenizer: Any,
    context: str,
    tiny_llama: Callable[..., CausalLM],
    transformers_logits: Callable[..., np.ndarray],
    make_validation: Callable[..., Validation],
) -> None:
    """fp32 compute against transformers' model in float64, one document at a time: 1e-5."""
    keys = {"seq_lens": SEQ_LENS, "context": context, "micro_batch_tokens": 96}
    metrics = make_validation(tokenizer, SETS, **keys).run(tiny_llama(torch.float32), step=0)
    assert metrics is not None
    expected = {}
    for seq_len in SEQ_LENS:
        reference = plain.Reference(transformers_logits, tokenizer, context=context, seq_len=seq_len)
        expected |= {f"{name}@{seq_len}": value for name, value in expected_metrics(plain, reference).items()}
    assert_metrics(metrics, expected, rel=1e-5)


@pytest.mark.parametrize("tokenizer", TOKENIZERS[:1], indirect=True)
@pytest.mark.parametrize("context", ["none", "prefix"])
def test_float64_equals_the_reference_to_its_last_digits(
    plain: Any,
    tokenizer: Any,
    context: str,
    tiny_llama: Callable[..., CausalLM],
    own_logits: Callable[..., Any],
    make_validation: Callable[..., Validation],
) -> None:
    model = tiny_llama(torch.float64)
    metrics = make_validation(tokenizer, SETS, seq_lens=[16], context=context, micro_batch_tokens=80).run(model, step=0)
    assert metrics is not None
    reference = plain.Reference(own_logits(model), tokenizer, context=context, seq_len=16)
    expected = {f"{name}@16": value for name, value in expected_metrics(plain, reference).items()}
    assert_metrics(metrics, expected, rel=1e-11)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, indirect=True)
@pytest.mark.parametrize("context", ["none", "prefix"])
def test_each_document_is_recorded_with_exact_counts(
    plain: Any,
    tokenizer: Any,
    context: str,
    tmp_path: Path,
    tiny_llama: Callable[..., CausalLM],
    transformers_logits: Callable[..., np.ndarray],
    make_validation: Callable[..., Validation],
) -> None:
    """val.save_arrays. With a prefix the bytes of a text are all of its UTF-8 bytes, whatever the tokenizer."""
    import pyarrow.parquet as pq

    sets = {name: SETS[name] for name in ("texts", "continuations", "choices")}
    keys = {"seq_lens": [16], "context": context, "micro_batch_tokens": 64, "arrays_dir": tmp_path / "val"}
    make_validation(tokenizer, sets, **keys).run(tiny_llama(torch.float32), step=3)
    reference = plain.Reference(transformers_logits, tokenizer, context=context, seq_len=16)
    for name, rows in sets.items():
        records = pq.read_table(tmp_path / "val" / "step_3" / f"{name}.parquet").to_pylist()
        assert {record["seq_len"] for record in records} == {16}
        by_document = {record["document"]: record for record in records}
        assert len(by_document) == len(records)
        for number, row in enumerate(rows):
            assert_record(by_document.pop(number, None), row, reference)
            if name == "texts" and context == "prefix":
                (record,) = [record for record in records if record["document"] == number]
                assert record["bytes"] == len(row["text"].encode())
        assert not by_document


def assert_record(record: dict[str, Any] | None, row: dict[str, Any], reference: Any) -> None:
    """The record of a document is that of the reference, or missing where the reference scores nothing."""
    options = None
    if "text" in row:
        scored, correct = reference.text(row["text"]), None
        scored = scored if scored.tokens else None
    elif "continuation" in row:
        scored = reference.continuation(row["context"], row["continuation"])
        correct = scored is not None and scored.hits == scored.tokens
    else:
        options = [reference.continuation(row["context"], option) for option in row["choices"]]
        scored, correct = options[row["answer"]], None
        if None in options:
            scored = None
        else:
            correct = int(np.argmin([option.nats for option in options])) == row["answer"]
    if scored is None:
        assert record is None
        return
    assert record is not None
    assert (record["tokens"], record["bytes"]) == (scored.tokens, scored.num_bytes)
    assert record["nats"] == pytest.approx(scored.nats, rel=1e-5)
    assert record["correct"] == correct
    nats = None if options is None else pytest.approx([option.nats for option in options], rel=1e-5)
    assert record["option_nats"] == nats


@pytest.mark.parametrize("context", ["none", "prefix"])
def test_token_shards_equal_the_reference(
    plain: Any,
    context: str,
    tiny_heldout: Path,
    tiny_tokenizer: Path,
    tiny_llama: Callable[..., CausalLM],
    transformers_logits: Callable[..., np.ndarray],
    make_validation: Callable[..., Validation],
) -> None:
    """EOS is a token of the loss, and no text."""
    tokenizer = load_tokenizer(str(tiny_tokenizer))
    (shard,) = tiny_heldout.glob("*.ds")
    ends = np.fromfile(f"{shard}.index", "<u8").astype(int)
    documents = np.split(np.fromfile(shard, "<u2").astype(int), ends[:-1])
    assert all(document[-1] == tokenizer.eos_token_id for document in documents)
    validation = make_validation(tokenizer, {"held": tiny_heldout}, seq_lens=SEQ_LENS, context=context)
    metrics = validation.run(tiny_llama(torch.float32), step=0)
    assert metrics is not None
    expected = {}
    for seq_len in SEQ_LENS:
        reference = plain.Reference(transformers_logits, tokenizer, context=context, seq_len=seq_len)
        found = plain.text_metrics([reference.token_document(document.tolist()) for document in documents])
        expected |= {f"val/held/{name}@{seq_len}": value for name, value in found.items()}
    assert_metrics(metrics, expected, rel=1e-5)


def test_acc_of_continuations_is_about_all_of_their_tokens(
    plain: Any,
    tiny_tokenizer: Path,
    tiny_llama: Callable[..., CausalLM],
    transformers_logits: Callable[..., np.ndarray],
    make_validation: Callable[..., Validation],
) -> None:
    """Continuations that are the model's own first choices, and the same with a letter more that is not."""
    tokenizer, generator, rows = load_tokenizer(str(tiny_tokenizer)), np.random.default_rng(5), []
    for _ in range(60):
        context = "".join(generator.choice([*"abcdefgh .,"], generator.integers(2, 20))) + "k"
        ids = tokenizer.encode(context)
        chosen = str(tokenizer.decode([int(transformers_logits(ids)[-1].argmax())]))
        if chosen.isascii() and len(tokenizer.encode(context + chosen)) == len(ids) + 1:
            rows += [{"context": context, "continuation": text} for text in (chosen, f"{chosen}Q", f"Q{chosen}")]
    reference = plain.Reference(transformers_logits, tokenizer, context="none", seq_len=32)
    scored = [reference.continuation(**row) for row in rows]
    hits = {(document.hits, document.tokens) for document in scored}
    assert {(1, 1), (1, 2), (0, 2)} <= hits
    expected = plain.continuation_metrics(scored)
    assert 0.2 < expected["acc"] < 0.6
    metrics = make_validation(tokenizer, {"greedy": rows}, seq_lens=[32]).run(tiny_llama(torch.float32))
    assert metrics is not None
    assert_metrics(metrics, {f"val/greedy/{name}@32": value for name, value in expected.items()}, rel=1e-5)


def test_mixed_lengths_score_alike_one_by_one_and_eight_at_a_time(
    tmp_path: Path,
    tiny_tokenizer: Path,
    tiny_llama: Callable[..., CausalLM],
    make_validation: Callable[..., Validation],
) -> None:
    """Field case R106: documents of all lengths in rows of one and of eight windows: padding and positions leave every
    document's nats alone."""
    import pyarrow.parquet as pq

    tokenizer, model, nats = load_tokenizer(str(tiny_tokenizer)), tiny_llama(torch.float32), []
    for rows_per_forward in (1, 8):
        arrays_dir = tmp_path / f"rows_{rows_per_forward}"
        keys = {"seq_lens": [48], "micro_batch_tokens": 48 * rows_per_forward, "arrays_dir": arrays_dir}
        make_validation(tokenizer, {"texts": SETS["texts"]}, **keys).run(model, step=0)
        nats.append(pq.read_table(arrays_dir / "step_0" / "texts.parquet")["nats"].to_pylist())
    assert len(nats[0]) >= 12
    assert nats[1] == pytest.approx(nats[0], abs=1e-4, rel=1e-6)
