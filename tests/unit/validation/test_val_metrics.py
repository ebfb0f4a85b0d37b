"""Each metric on scores made by hand, against its formula written out."""

import math
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import RunError
from trainer.validation.metrics import (
    Options,
    choice_metrics,
    choice_records,
    continuation_metrics,
    continuation_records,
    pair_metrics,
    pair_records,
    text_metrics,
    text_records,
)
from trainer.validation.windows import DocumentScores, Scores


def scores_of(
    nats: list[float],
    num_tokens: list[int] | None = None,
    *,
    text_nats: list[float] | None = None,
    num_bytes: list[int] | None = None,
    hits: list[int] | None = None,
) -> Scores:
    tokens = [1] * len(nats) if num_tokens is None else num_tokens
    return Scores(
        nats=np.array(nats, np.float64),
        text_nats=np.array(nats if text_nats is None else text_nats, np.float64),
        num_tokens=np.array(tokens, np.float64),
        num_bytes=np.array(tokens if num_bytes is None else num_bytes, np.float64),
        hits=np.array([0] * len(nats) if hits is None else hits, np.float64),
    )


def options_of(sizes: list[int], answers: list[int], num_bytes: list[int], firsts: list[int] | None = None) -> Options:
    return Options(
        borders=np.cumsum([0, *sizes], dtype=np.int64),
        answers=np.array(answers, np.int64),
        num_bytes=np.array(num_bytes, np.int64),
        firsts=np.arange(sum(sizes)) if firsts is None else np.array(firsts, np.int64),
    )


def pairs_of(num_bytes: list[int], firsts: list[int] | None = None) -> Options:
    documents = len(num_bytes) // 2
    return options_of([2] * documents, [0] * documents, num_bytes, firsts)


def correct_of(records: DocumentScores) -> list[bool]:
    assert records.correct is not None
    return records.correct.tolist()


def options_in(records: DocumentScores) -> list[list[float]]:
    assert records.option_nats is not None
    return [nats.tolist() for nats in records.option_nats]


def test_loss_is_over_all_tokens_and_bits_over_the_bytes_of_text() -> None:
    """Field case R16: (nats, tokens) of (2, 1) and (90, 9): 92 / 10, not the mean of 2 and 10."""
    scores = scores_of([2, 90], [1, 9], text_nats=[2, 80], num_bytes=[3, 38])
    assert text_metrics(scores) == {"loss": 9.2, "perplexity": math.exp(9.2), "bpb": 82 / (math.log(2) * 41)}


def test_sequences_without_a_window_count_nowhere() -> None:
    scores = scores_of([2, 0, 90], [1, 0, 9], num_bytes=[3, 0, 38], hits=[1, 0, 8])
    assert text_metrics(scores)["loss"] == 9.2
    assert continuation_metrics(scores) == {"loss": 9.2, "bpb": 92 / (math.log(2) * 41), "acc": 0.5}


def test_a_continuation_is_right_when_all_its_tokens_are_hits() -> None:
    scores = scores_of([1, 1, 1, 1], [3, 2, 1, 4], hits=[3, 1, 1, 0])
    assert continuation_metrics(scores)["acc"] == 0.5
    assert correct_of(continuation_records(scores, np.array([4, 5, 7, 9]))) == [True, False, True, False]


def test_pairs() -> None:
    scores = scores_of([4.0, 6.0, 5.0, 5.0, 9.0, 3.0, 4.0, 6.0])
    options = pairs_of([2, 6, 10, 5, 18, 2, 2, 3])
    # per byte: 2 against 1, 0.5 against 1, 0.5 against 1.5, 2 against 2; a tie is not right, of nats or of these
    assert pair_metrics(scores, options) == {"acc": 2 / 4, "acc_norm": 2 / 4, "margin": (2 + 0 - 6 + 2) / 4}
    assert correct_of(pair_records(scores, options, np.arange(4))) == [True, False, False, True]


def test_choices_of_different_numbers_of_options() -> None:
    scores = scores_of([3, 1, 2, 5, 4, 7])
    options = options_of([3, 1, 2], [1, 0, 1], [9, 1, 1, 2, 1, 3])
    # nats choose 1, 0, 0; nats per byte 1/3, 1, 2 | 5/2 | 4, 7/3 choose 0, 0, 1
    assert choice_metrics(scores, options) == {"acc": 2 / 3, "acc_norm": 2 / 3}
    records = choice_records(scores, options, np.array([0, 3, 4]))
    assert records.documents.tolist() == [0, 3, 4]
    assert records.nats.tolist() == [1, 5, 7]
    assert correct_of(records) == [True, True, False]
    assert options_in(records) == [[3, 1, 2], [5], [4, 7]]


@pytest.mark.parametrize(("answer", "acc"), [(0, 0.0), (1, 1.0), (2, 0.0)])
def test_of_options_that_tie_the_first_is_chosen(answer: int, acc: float) -> None:
    options = options_of([4], [answer], [2, 2, 2, 2])
    assert choice_metrics(scores_of([3, 1, 1, 2]), options) == {"acc": acc, "acc_norm": acc}


def test_equal_options_tie_whatever_rounding_makes_of_them() -> None:
    """They are scored in different rows. The numbers of the first one count, in metrics and in records."""
    numbers = np.arange(2)
    scores, options = scores_of([3.0, 3.0 + 1e-7, 3.0 + 1e-7, 3.0]), pairs_of([4, 4, 3, 4], [0, 0, 2, 2])
    # Equal tokens of texts that a tokenizer makes equal: per byte the second pair's rejected text is the better one.
    assert pair_metrics(scores, options) == {"acc": 0.0, "acc_norm": 0.0, "margin": 0.0}
    records = pair_records(scores, options, numbers)
    assert correct_of(records) == [False, False]
    assert options_in(records) == [[3.0] * 2, [3.0 + 1e-7] * 2]
    scores = scores_of([5, 2 + 1e-7, 2, 2, 2 + 1e-7, 9])
    options = options_of([3, 3], [1, 1], [7] * 6, [0, 1, 1, 3, 3, 5])
    assert choice_metrics(scores, options) == {"acc": 0.5, "acc_norm": 0.5}
    records = choice_records(scores, options, numbers)
    assert correct_of(records) == [True, False]
    assert options_in(records) == [[5, 2 + 1e-7, 2 + 1e-7], [2, 2, 9]]
    assert records.nats.tolist() == [2 + 1e-7, 2]


def test_documents_left_out_change_no_share() -> None:
    tokens = [2, 1, 0, 0, 3, 3]
    scores = scores_of([4, 6, 0, 0, 9, 3], tokens, num_bytes=[8, 5, 0, 0, 7, 7])
    assert pair_metrics(scores, pairs_of([1] * 6)) == {"acc": 0.5, "acc_norm": 0.5, "margin": -2.0}
    options = options_of([2, 2, 2], [1, 1, 1], [1] * 6)
    assert choice_metrics(scores, options) == {"acc": 0.5, "acc_norm": 0.5}
    assert correct_of(choice_records(scores, options, np.arange(3))) == [False, True]
    records = pair_records(scores, pairs_of([1] * 6), np.array([10, 11, 12]))
    assert records.documents.tolist() == [10, 12]
    assert [records.num_tokens.tolist(), records.num_bytes.tolist()] == [[2, 3], [8, 7]]
    assert correct_of(records) == [True, False]
    assert options_in(records) == [[4, 6], [9, 3]]


def test_records_of_texts() -> None:
    records = text_records(scores_of([2, 0, 90], [1, 0, 9], num_bytes=[3, 0, 38]), np.array([5, 6, 8]))
    assert records.documents.tolist() == [5, 8]
    assert records.nats.tolist() == [2, 90]
    assert [records.num_tokens.tolist(), records.num_bytes.tolist()] == [[1, 9], [3, 38]]
    assert [records.num_tokens.dtype, records.num_bytes.dtype] == [np.int64, np.int64]
    assert records.correct is None and records.option_nats is None


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_choices_are_numpys_argmax(data: st.DataObject) -> None:
    """The rule of lm-evaluation-harness: argmax of the log-likelihoods, and of those per byte."""
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    nats = [[float(data.draw(st.integers(0, 3))) for _ in range(size)] for size in sizes]
    num_bytes = [[data.draw(st.integers(1, 3)) for _ in range(size)] for size in sizes]
    answers = [data.draw(st.integers(0, size - 1)) for size in sizes]
    found = choice_metrics(scores_of(list(chain(*nats))), options_of(sizes, answers, list(chain(*num_bytes))))
    each = list(zip(nats, num_bytes, answers, strict=True))
    acc = [int(np.argmax(-np.array(costs))) == answer for costs, _, answer in each]
    acc_norm = [int(np.argmax(-np.array(costs) / np.array(sizes))) == answer for costs, sizes, answer in each]
    assert found == {"acc": sum(acc) / len(sizes), "acc_norm": sum(acc_norm) / len(sizes)}


def test_a_model_that_gives_no_number_gets_none() -> None:
    """An accuracy out of NaN would look like a bad model's, not like a broken one's."""
    scores = scores_of([1, math.nan, 2, 3])
    options = pairs_of([1] * 4)
    assert all(math.isnan(value) for value in text_metrics(scores).values())
    assert all(math.isnan(value) for value in continuation_metrics(scores).values())
    assert all(math.isnan(value) for value in pair_metrics(scores, options).values())
    assert all(math.isnan(value) for value in choice_metrics(scores, options).values())
    assert correct_of(choice_records(scores, options, np.arange(2))) == [False, True]


def test_an_option_of_probability_zero_is_just_the_worst() -> None:
    scores = scores_of([1, math.inf])
    assert choice_metrics(scores, options_of([2], [0], [1, 1])) == {"acc": 1.0, "acc_norm": 1.0}
    assert pair_metrics(scores, pairs_of([1, 1]))["acc"] == 1.0


def test_nothing_scored_is_an_error() -> None:
    nothing = scores_of([0, 0], [0, 0])
    options = pairs_of([1, 1])
    for compute in (text_metrics, continuation_metrics):
        with pytest.raises(RunError, match="no token was scored"):
            compute(nothing)
    for compute in (pair_metrics, choice_metrics):
        with pytest.raises(RunError, match="no document was scored"):
            compute(nothing, options)
    with pytest.raises(RunError, match="no token that spells text was scored"):
        text_metrics(scores_of([3.0], [1], num_bytes=[0]))
    with pytest.raises(RunError, match="no document was scored"):
        choice_metrics(scores_of([]), options_of([], [], []))
