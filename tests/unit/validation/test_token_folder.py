"""Token folders as held-out sets: bytes, masks, the first so many documents, digests and faults."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.errors import ConfigError
from models.batch import IGNORE_INDEX
from trainer.errors import RunError
from trainer.validation.metrics import text_metrics
from trainer.validation.sets.token_folder import TokenFolder
from trainer.validation.windows import LikelihoodSet, Scores

EOS = 0
BYTES = np.arange(50) % 7
"""Of every id; 0 for the EOS."""

DOCUMENTS = [[40, 41, 42, EOS], [43, EOS], [44, 45, 46, 47, 48, EOS]]


def make_set(folder: Path, **others: Any) -> TokenFolder:
    defaults = {"byte_counts": BYTES, "eos_token_id": EOS, "tokenizer_name": "tiny", "prefix_id": None}
    return TokenFolder("held", folder, **(defaults | others))


def read_labels(set_: LikelihoodSet, seq_len: int) -> list[tuple[list[int], int]]:
    windows = set_.windows(seq_len)
    pieces = [set_.read(windows, np.array([number])) for number in range(len(windows.sequences))]
    return [(piece.labels.tolist(), int(piece.num_bytes[0])) for piece in pieces]


def test_bytes_are_those_of_the_scored_tokens(write_shard: Callable[..., Path]) -> None:
    set_ = make_set(write_shard(DOCUMENTS))
    assert read_labels(set_, 4) == [([41, 42, EOS], 6 + 0), ([EOS], 0), ([45, 46, 47], 3 + 4 + 5), ([EOS], 0)]
    assert set_.num_documents == 3
    assert not set_.wants_hits


def test_tokens_that_are_no_targets_are_not_scored(write_shard: Callable[..., Path]) -> None:
    loss = [1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1]
    set_ = make_set(write_shard(DOCUMENTS, loss=loss), prefix_id=EOS)
    ignored = IGNORE_INDEX
    assert read_labels(set_, 4) == [
        ([40, 41, ignored, EOS], 5 + 6),
        ([43, EOS], 1),
        ([ignored, ignored, 46, 47], 4 + 5),
        ([ignored, ignored, ignored, EOS], 0),
    ]


def test_the_first_documents_only(write_shard: Callable[..., Path]) -> None:
    folder = write_shard(DOCUMENTS)
    set_ = make_set(folder, max_documents=2, prefix_id=EOS)
    assert read_labels(set_, 8) == [([40, 41, 42, EOS], 5 + 6 + 0), ([43, EOS], 1)]
    assert set_.num_documents == 2
    assert make_set(folder, max_documents=9).num_documents == 3


def test_documents_without_tokens_are_counted(write_shard: Callable[..., Path]) -> None:
    set_ = make_set(write_shard([[40, EOS], [], [41, EOS]]))
    assert set_.num_documents == 2
    assert set_.notes == ["held-out set held: documents without tokens, left out: 1"]
    assert make_set(write_shard(DOCUMENTS, "whole")).notes == []


def test_documents_of_one_token_are_left_out_without_a_prefix(write_shard: Callable[..., Path]) -> None:
    folder = write_shard([[EOS], [40, EOS], [EOS]])
    assert make_set(folder).windows(8).left_out == {"too short to score": 2}
    assert make_set(folder, prefix_id=EOS).windows(8).left_out == {}


def test_a_prefix_is_found_over_shards(write_shard: Callable[..., Path], tmp_path: Path) -> None:
    """Also where a shard between two others holds nothing."""
    folder = write_shard([[9, 40, EOS], [41, EOS]])
    for name, documents in (("b", [[9, 42, EOS]]), ("c", []), ("d", [[43, EOS], [9, EOS]])):
        for file in write_shard(documents, name).iterdir():
            file.rename(folder / file.name.replace("00000_00000", name))
    windows = make_set(folder, prefix_id=9).windows(8)
    assert windows.prefixed.tolist() == [False, True, False, True, False]
    assert windows.num_inputs.tolist() == [2, 2, 2, 2, 1]


def test_the_digest_is_of_what_is_scored(write_shard: Callable[..., Path]) -> None:
    folder = write_shard(DOCUMENTS)
    digests = {
        make_set(folder).digest,
        make_set(folder, max_documents=2).digest,
        make_set(folder, prefix_id=EOS).digest,
        make_set(folder, byte_counts=BYTES + 1).digest,
        make_set(write_shard([[40, 41, 43, EOS], *DOCUMENTS[1:]], "changed")).digest,
    }
    assert len(digests) == 5
    assert make_set(write_shard(DOCUMENTS, "moved")).digest == make_set(folder).digest
    assert make_set(folder, max_documents=3).digest == make_set(folder).digest


def test_metrics_and_records(write_shard: Callable[..., Path]) -> None:
    set_ = make_set(write_shard(DOCUMENTS))
    values = [np.array(column, np.float64) for column in ([3, 0, 8], [2, 0, 6], [3, 0, 5], [6, 0, 12], [0, 0, 0])]
    nats, text_nats, num_tokens, num_bytes, hits = values
    scores = Scores(nats=nats, text_nats=text_nats, num_tokens=num_tokens, num_bytes=num_bytes, hits=hits)
    assert set_.metrics(scores) == text_metrics(scores)
    records = set_.documents(scores)
    assert [records.documents.tolist(), records.nats.tolist()] == [[0, 2], [3, 8]]


def test_ids_beyond_the_vocabulary_are_named(write_shard: Callable[..., Path]) -> None:
    set_ = make_set(write_shard([[40, 41, EOS], [42, 50, 61, EOS]]))
    windows = set_.windows(8)
    assert set_.read(windows, np.array([0])).labels.tolist() == [41, EOS]
    with pytest.raises(RunError, match=r"held-out set held: .*\.ds: token 4 has id 50, but the model's vocabulary"):
        set_.read(windows, np.array([0, 1]))


def test_a_damaged_index_is_named(write_shard: Callable[..., Path]) -> None:
    folder = write_shard(DOCUMENTS)
    (index,) = folder.glob("*.index")
    np.array([4, 3, 12], "<u8").tofile(index)
    with pytest.raises(ConfigError, match=r"val\.sets.*\.index is damaged"):
        make_set(folder, eos_token_id=None)


def test_shards_of_another_tokenizer_are_refused(write_shard: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"val\.sets.*not with the end-of-text token 7 of tokenizer tiny"):
        make_set(write_shard(DOCUMENTS), eos_token_id=7)
