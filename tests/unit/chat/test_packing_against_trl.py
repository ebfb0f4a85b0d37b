"""Our packer beside TRL's best-fit, and on lengths like those of real chats."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from trainer.data.packing import pack

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def chat_lengths() -> ModuleType:
    """benchmarks/chat_lengths.py"""
    spec = importlib.util.spec_from_file_location("chat_lengths", ROOT / "benchmarks" / "chat_lengths.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["chat_lengths"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("mix", ["chat", "reasoning"])
@pytest.mark.parametrize("seq_len", [2048, 8192])
def test_padding_is_under_3_percent(chat_lengths: ModuleType, mix: str, seq_len: int) -> None:
    sizes = chat_lengths.lengths(3000, mix=mix)
    assert chat_lengths.padding(sizes, seq_len, "best_fit") < 0.03
    assert chat_lengths.padding(sizes, seq_len, "sequential") > 0.05, "so that the mix is a hard one"


def test_lengths_and_conversations_depend_on_the_seed_alone(chat_lengths: ModuleType) -> None:
    assert chat_lengths.lengths(4).tolist() == [143, 293, 624, 469]
    assert 450 < chat_lengths.lengths(20_000).mean() < 650
    rows = chat_lengths.conversations(50, seed=1)
    assert rows == chat_lengths.conversations(50, seed=1) != chat_lengths.conversations(50, seed=2)
    words = [sum(len(message["content"].split(" ")) for message in row["messages"]) for row in rows]
    expected = chat_lengths.lengths(50, seed=1)
    assert np.corrcoef(words, expected)[0, 1] > 0.95
    assert {row["messages"][-1]["role"] for row in rows} == {"assistant"}
    assert {len(row["messages"]) for row in rows} >= {2, 3}


def test_no_more_padding_than_trl(chat_lengths: ModuleType) -> None:
    """The same lengths, among them ones longer than a row, which both cut."""
    data_utils = pytest.importorskip("trl.data_utils", reason="trl is not installed")
    from datasets import Dataset

    for seq_len, sizes in (
        (2048, chat_lengths.lengths(2000)),
        (1000, chat_lengths.lengths(1000, mix="reasoning", seed=3)),
        (64, np.random.default_rng(0).integers(1, 65, 1000)),
    ):
        samples = Dataset.from_dict({"input_ids": [np.zeros(size, np.int32) for size in sizes.tolist()]})
        packed = data_utils.pack_dataset(samples, seq_length=seq_len, strategy="bfd")
        cut = np.minimum(sizes, seq_len)
        assert sum(len(row) for row in packed["input_ids"]) == cut.sum()
        assert pack(cut, seq_len).num_rows <= packed.num_rows
