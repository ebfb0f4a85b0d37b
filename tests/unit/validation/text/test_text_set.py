"""What is scored of a row, against lm-evaluation-harness where it has a say."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

from configs.errors import ConfigError
from models.batch import IGNORE_INDEX
from trainer.validation.sets.text_set import TextSet
from trainer.validation.windows import Scores

A, SPACE = (sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter) for letter in "aĠ")
"""Ids of the byte-level tokenizer."""

Scored = tuple[list[int], list[int]]
"""Ids before the first scored one, and the scored ones."""


def pieces(set_: TextSet, seq_len: int = 256) -> list[Scored]:
    windows = set_.windows(seq_len)
    found = []
    for number in range(len(windows.sequences)):
        piece = set_.read(windows, np.array([number]))
        scored = piece.labels[piece.labels != IGNORE_INDEX].tolist()
        ids = [*piece.input_ids.tolist(), int(piece.labels[-1])]
        found.append((ids[: -len(scored)], scored))
    return found


def scores_of(set_: TextSet, nats: list[float], hits: list[int] | None = None) -> Scores:
    """Scores as if each sequence with a window had these."""
    windows = set_.windows(256)
    all_: dict[str, np.ndarray] = {
        name: np.zeros(set_.num_sequences) for name in ("nats", "text_nats", "num_tokens", "num_bytes", "hits")
    }
    for number, sequence in enumerate(windows.sequences.tolist()):
        piece = set_.read(windows, np.array([number]))
        all_["num_tokens"][sequence] = np.count_nonzero(piece.labels != IGNORE_INDEX)
        all_["num_bytes"][sequence] = piece.num_bytes[0]
    all_["nats"][windows.sequences] = all_["text_nats"][windows.sequences] = nats
    if hits is not None:
        all_["hits"][windows.sequences] = hits
    return Scores(**all_)


def random_text(generator: random.Random, most: int) -> str:
    letters = generator.choices("then \n\u00a0é🐕", weights=[4, 4, 2, 2, 6, 2, 1, 1, 1], k=generator.randint(0, most))
    return "".join(letters)


@pytest.mark.parametrize("family", ["byte-level BPE", "byte-level BPE that adds BOS", "SentencePiece, Prepend"])
def test_context_and_continuation_are_cut_as_lm_eval_does(
    make_set: Callable[..., TextSet], tokenizer_of: Callable[[str], PreTrainedTokenizerBase], family: str
) -> None:
    """Merges cross the border here: its tokens, its scored tokens, and the rows of which nothing is left."""
    model = pytest.importorskip("lm_eval.api.model", reason="the group peers (lm_eval) is not installed")
    tokenizer = tokenizer_of(family)
    prefix: dict[str, Any] = {"prefix_id": tokenizer.bos_token_id, "always": True} if "BOS" in family else {}
    harness: Any = SimpleNamespace(backend="causal", tok_encode=tokenizer.encode)
    generator = random.Random(0)
    rows = [(random_text(generator, 6), random_text(generator, 4)) for _ in range(400)]
    expected, moved = [], 0
    for context, continuation in rows:
        if not context.rstrip() or not continuation:
            continue
        cut, scored = model.TemplateLM._encode_pair(harness, context, continuation)
        moved += context != context.rstrip()
        if scored:
            expected.append((tokenizer.encode(context + continuation)[: -len(scored)], scored))
            assert len(expected[-1][0]) == len(cut)
    set_ = make_set([{"context": c, "continuation": t} for c, t in rows if c.rstrip()], tokenizer=tokenizer, **prefix)
    assert pieces(set_) == expected
    assert moved > 20
    assert any("no token stands for the continuation alone" in note for note in set_.notes)
    assert any("whose context ends within a token" in note for note in set_.notes)


def test_a_border_inside_a_token(make_set: Callable[..., TextSet], tokenizer_of: Callable[..., Any]) -> None:
    """`Ġ` + `Ġ` merge, and two spaces at the end of the context go to the continuation; `t` + `h` merge across."""
    set_ = make_set([{"context": "a  ", "continuation": "b"}, {"context": "at", "continuation": "he"}])
    tokenizer = tokenizer_of("byte-level BPE")
    cut = [(tokenizer.decode(before), tokenizer.decode(scored)) for before, scored in pieces(set_)]
    assert cut == [("a", "  b"), ("ath", "e")]
    (note,) = set_.notes
    assert note.startswith("held-out set set: documents whose context ends within a token, which counts as context as ")
    assert note.endswith("rows.jsonl, line 2)")


def test_rows_with_nothing_to_score_are_counted(make_set: Callable[..., TextSet]) -> None:
    rows = [
        {"context": "a", "continuation": ""},
        {"context": "a ", "continuation": ""},
        {"context": "a", "continuation": "b"},
        {"context": "n", "continuation": " "},  # n and a space are one token
    ]
    set_ = make_set(rows)
    assert set_.num_documents == 4
    assert set_.num_sequences == 1
    first, second = set_.notes
    assert first.startswith("held-out set set: documents left out, because a text is empty: 2 (first: ")
    assert first.endswith("rows.jsonl, line 1)")
    assert "because no token stands for the continuation alone: 1 (" in second
    assert second.endswith("rows.jsonl, line 4)")


def test_a_set_with_nothing_to_score_says_why(make_set: Callable[..., TextSet]) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl has nothing to score; .* because a text is empty: 2 \(first"):
        make_set([{"text": ""}, {"text": ""}])


def test_documents_keep_the_numbers_of_their_rows(make_set: Callable[..., TextSet]) -> None:
    set_ = make_set([{"text": "abc"}, {"text": ""}, {"text": "d"}, {"text": "efg"}])
    assert set_.windows(8).left_out == {"too short to score": 1}
    records = set_.documents(scores_of(set_, [2.0, 4.0]))
    assert records.documents.tolist() == [0, 3]
    assert records.nats.tolist() == [2.0, 4.0]
    assert records.num_bytes.tolist() == [2, 2]
    assert set_.metrics(scores_of(set_, [2.0, 4.0]))["loss"] == 1.5


def test_nothing_crosses_documents(make_set: Callable[..., TextSet]) -> None:
    set_ = make_set([{"text": "abcde"}, {"text": "fgh"}])
    a = 64
    assert pieces(set_, 3) == [([a], [a + 1, a + 2]), ([a + 3], [a + 4]), ([a + 5], [a + 6, a + 7])]


def test_pairs(make_set: Callable[..., TextSet]) -> None:
    rows = [
        {"context": "q", "chosen": "yes", "rejected": "no"},
        {"chosen": "a", "rejected": ""},
        {"context": None, "chosen": "abcd", "rejected": "no"},
    ]
    set_ = make_set(rows, prefix_id=300)
    assert [before for before, _ in pieces(set_)] == [[80], [80], [300], [300]]
    scores = scores_of(set_, [3.0, 4.0, 3.0, 2.0])
    assert set_.metrics(scores) == {"acc": 0.5, "acc_norm": 1.0, "margin": 0.0}
    records = set_.documents(scores)
    assert records.documents.tolist() == [0, 2]
    assert records.correct is not None and records.correct.tolist() == [True, False]
    assert records.num_bytes.tolist() == [3, 4]


def test_choices_of_any_number(make_set: Callable[..., TextSet]) -> None:
    rows = [
        {"context": "q ", "choices": ["é", "b", "ccc"], "answer": 0},
        {"context": "q", "choices": ["a", "b"], "answer": 1},
        {"context": "n", "choices": ["x", " "], "answer": 0},
    ]
    set_ = make_set(rows)
    assert set_.num_sequences == 5, "a question one option of which cannot be scored has none"
    # Per byte of the options as they are given: 5/2, 4, 10/3, without the space that is scored with them.
    scores = scores_of(set_, [5.0, 4.0, 10.0, 2.0, 2.0])
    assert set_.metrics(scores) == {"acc": 0.0, "acc_norm": 0.5}
    records = set_.documents(scores)
    assert records.documents.tolist() == [0, 1]
    assert records.nats.tolist() == [5.0, 2.0]
    assert records.option_nats is not None
    assert [nats.tolist() for nats in records.option_nats] == [[5.0, 4.0, 10.0], [2.0, 2.0]]


def test_equal_options_have_the_scores_of_the_first(make_set: Callable[..., TextSet]) -> None:
    """Their windows are equal, but lie in different rows: rounding would decide which is the better one."""
    rows = [
        {"context": "q", "choices": ["a", "b", "a", "b", "c"], "answer": 3},
        {"context": "q", "choices": ["b", "a", "a"], "answer": 1},
    ]
    set_ = make_set(rows)
    scores = scores_of(set_, [3.0, 2.0, 2.9, 1.9, 4.0, 5.0, 2.0, 1.9])
    assert set_.metrics(scores) == {"acc": 0.5, "acc_norm": 0.5}
    records = set_.documents(scores)
    assert records.correct is not None and records.correct.tolist() == [False, True]
    assert records.nats.tolist() == [2.0, 2.0]
    assert records.option_nats is not None
    assert [nats.tolist() for nats in records.option_nats] == [[3.0, 2.0, 3.0, 2.0, 4.0], [5.0, 2.0, 2.0]]
    set_ = make_set([{"chosen": "ab", "rejected": "ab"}, {"chosen": "ab", "rejected": "abc"}])
    assert set_.metrics(scores_of(set_, [1.5, 2.0, 1.5, 2.0])) == {"acc": 0.5, "acc_norm": 0.0, "margin": 0.25}


def test_an_empty_option_is_none_though_a_space_of_the_context_goes_to_it(make_set: Callable[..., TextSet]) -> None:
    """Nats per byte of nothing are no number."""
    kept = {"context": "q ", "chosen": "x", "rejected": "y"}
    set_ = make_set([{"context": "q ", "chosen": "x", "rejected": ""}, kept])
    assert set_.num_sequences == 2
    assert "because a text is empty: 1" in set_.notes[0]


def test_options_are_left_out_together_where_one_is_too_long(make_set: Callable[..., TextSet]) -> None:
    rows = [
        {"context": "q", "choices": ["a", "abcdefgh", "b"], "answer": 0},
        {"context": "q", "choices": ["a", "abcd"], "answer": 1},
    ]
    windows = make_set(rows).windows(4)
    assert windows.sequences.tolist() == [3, 4]
    assert windows.left_out == {"longer than a window": 1}


def test_options_are_weighed_by_their_own_bytes(make_set: Callable[..., TextSet]) -> None:
    """Not by their tokens, nor by bytes that a space of the context or the context itself adds."""
    row = {"context": "qqqq ", "choices": ["the", "\u6771", "ab"], "answer": 1}
    set_ = make_set([row])
    # Per byte 1, 0.9 and 1.05; per character, per token, and with the space it is another one.
    assert set_.metrics(scores_of(set_, [3.0, 2.7, 2.1])) == {"acc": 0.0, "acc_norm": 1.0}
    assert set_.metrics(scores_of(set_, [3.0, 3.3, 2.1])) == {"acc": 0.0, "acc_norm": 0.0}


def test_hits_of_continuations(make_set: Callable[..., TextSet]) -> None:
    set_ = make_set([{"context": "q", "continuation": "abc"}, {"context": "q", "continuation": "ab"}])
    assert set_.metrics(scores_of(set_, [1.0, 1.0], hits=[3, 1]))["acc"] == 0.5


@pytest.mark.parametrize(
    ("prefix_id", "always", "expected"),
    [
        (None, False, [([A], [A + 1]), ([A + 1], [A + 2]), ([SPACE], [A + 4])]),
        (300, False, [([A], [A + 1]), ([300], [A + 1, A + 2]), ([300], [SPACE, A + 4])]),
        (300, True, [([300, A], [A + 1]), ([300], [A + 1, A + 2]), ([300], [SPACE, A + 4])]),
    ],
    ids=["none", "where needed", "always"],
)
def test_what_stands_before_a_sequence(
    make_set: Callable[..., TextSet], prefix_id: int | None, always: bool, expected: list[Scored]
) -> None:
    """With a context, without one, and with one that is white space and so goes to the continuation."""
    rows = [{"context": "a", "continuation": "b"}, {"context": "", "continuation": "bc"}]
    rows.append({"context": " ", "continuation": "e"})
    set_ = make_set(rows, prefix_id=prefix_id, always=always)
    assert pieces(set_) == expected


def test_max_documents_takes_the_first_rows(make_set: Callable[..., TextSet]) -> None:
    rows = [{"text": text} for text in ("ab", "", "cd", "ef")]
    set_ = make_set(rows, max_documents=3)
    assert set_.num_documents == 3
    assert [scored for _, scored in pieces(set_)] == [[65], [67]]
    assert make_set(rows, max_documents=9).num_documents == 4
    # What lies beyond is not read.
    assert make_set([{"text": "ab"}, {"text": 3}], max_documents=1).num_documents == 1


@pytest.mark.parametrize("most_chars", [1, 2**20])
def test_ids_beyond_the_models_vocabulary_are_named(
    make_set: Callable[..., TextSet], monkeypatch: pytest.MonkeyPatch, most_chars: int
) -> None:
    """With the first row that has the largest, in whatever batch."""
    monkeypatch.setattr("trainer.validation.sets.encode._BATCH_CHARS", most_chars)
    rows = [{"text": "ab"}, {"text": " the a"}, {"text": "b the"}]
    message = r"rows\.jsonl, line 2: its text has the token id 258, but the model's vocabulary has 258"
    with pytest.raises(ConfigError, match=message):
        make_set(rows, vocab_size=258)
    assert make_set(rows, vocab_size=259).num_documents == 3


def test_progress_is_told_in_rows(make_set: Callable[..., TextSet], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.validation.sets.encode._BATCH_CHARS", 2)
    told: list[tuple[str, int, int]] = []
    rows = [{"text": "ab"}, {"text": "bcd"}, {"text": "c"}]
    make_set(rows, track=lambda *progress: told.append(progress))
    assert told == [("tokenising held-out set set", done, 3) for done in range(4)]
