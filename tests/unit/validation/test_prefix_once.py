"""One BOS at the start of what a model reads, whoever put it there."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from configs.data import TokensDataConfig
from models.batch import IGNORE_INDEX
from trainer.data.build import build_source
from trainer.data.row import Rows
from trainer.validation.sets.token_folder import TokenFolder

BOS, EOS = 1, 0


def make_set(folder: Path, prefix_id: int | None) -> TokenFolder:
    byte_counts = np.ones(99, np.int64)
    return TokenFolder(
        "set", folder, byte_counts=byte_counts, eos_token_id=EOS, tokenizer_name="tiny", prefix_id=prefix_id
    )


def read_windows(set_: TokenFolder, seq_len: int) -> list[tuple[list[int], list[int]]]:
    windows = set_.windows(seq_len)
    pieces = [set_.read(windows, np.array([number])) for number in range(len(windows.sequences))]
    return [(piece.input_ids.tolist(), piece.labels.tolist()) for piece in pieces]


def test_shards_with_a_bos_get_no_second_one(write_shard: Callable[..., Path]) -> None:
    """Field case R24: the tokenizer wrote a BOS and `val.context = "prefix"` asks for one: one, at index 0."""
    with_bos = make_set(write_shard([[BOS, 40, 41, EOS], [BOS, 42, EOS]], "with"), BOS)
    assert read_windows(with_bos, 8) == [
        ([BOS, 40, 41], [40, 41, EOS]),
        ([BOS, 42], [42, EOS]),
    ]
    without = make_set(write_shard([[40, 41, EOS], [42, EOS]], "without"), BOS)
    assert read_windows(without, 8) == [([BOS, 40, 41], [40, 41, EOS]), ([BOS, 42], [42, EOS])]


def test_later_windows_have_the_tokens_before_them_instead(write_shard: Callable[..., Path]) -> None:
    set_ = make_set(write_shard([[BOS, 40, 41, 42, 43, EOS]]), BOS)
    assert read_windows(set_, 3) == [
        ([BOS, 40, 41], [40, 41, 42]),
        ([41, 42, 43], [IGNORE_INDEX, 43, EOS]),
    ]


def test_some_documents_may_have_one_and_others_not(write_shard: Callable[..., Path]) -> None:
    set_ = make_set(write_shard([[BOS, 40, EOS], [41, EOS], [BOS, 42, EOS]]), BOS)
    assert read_windows(set_, 8) == [([BOS, 40], [40, EOS]), ([BOS, 41], [41, EOS]), ([BOS, 42], [42, EOS])]


@pytest.mark.parametrize("loss", [None, [1, 1, 0, 1, 1, 1, 1]])
def test_the_same_tokens_are_scored_after_either_bos(write_shard: Callable[..., Path], loss: list[int] | None) -> None:
    """Up to the end of the pool, where the loss file has no byte more."""
    set_ = make_set(write_shard([[BOS, 40, 41, EOS], [BOS, 42, EOS]], loss=loss), BOS)
    scored = [label for _, labels in read_windows(set_, 8) for label in labels if label != IGNORE_INDEX]
    assert scored == [40, 41, EOS, 42, EOS] if loss is None else [40, EOS, 42, EOS]


def test_an_eos_that_is_the_bos_is_still_scored_alone(write_shard: Callable[..., Path]) -> None:
    """GPT-2's tokenizer has one token for both: a last window that is nothing but the EOS predicts it."""
    set_ = make_set(write_shard([[40, 41, EOS], [EOS]]), EOS)
    assert read_windows(set_, 2) == [
        ([EOS, 40], [40, 41]),
        ([40, 41], [IGNORE_INDEX, EOS]),
        ([EOS], [EOS]),
    ]


def test_without_a_prefix_nothing_is_added(write_shard: Callable[..., Path]) -> None:
    set_ = make_set(write_shard([[BOS, 40, 41, EOS]]), None)
    assert read_windows(set_, 8) == [([BOS, 40, 41], [40, 41, EOS])]


def test_training_rows_are_the_shards_tokens(write_shard: Callable[..., Path]) -> None:
    """Field case R24, in training: rows add no special token, so a document has the one BOS that was written."""
    folder = write_shard([[BOS, 40, 41, EOS], [BOS, 42, 43, EOS], [BOS, EOS]])
    config = TokensDataConfig(type="tokens", paths=[folder], seq_len=4, shuffle=False)
    source = build_source(config, vocab_size=99, eos_token_id=EOS, tokenizer_name="tiny")
    rows = Rows.empty(2, 4)
    source.fill(0, np.arange(2), rows)
    assert rows.input_ids.tolist() == [[BOS, 40, 41, EOS], [BOS, 42, 43, EOS]]
    assert rows.labels.tolist() == [[40, 41, EOS, BOS], [42, 43, EOS, BOS]]
