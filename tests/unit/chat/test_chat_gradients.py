"""Packed rows train exactly what their samples train one by one, in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.model import ModelConfig
from models.batch import IGNORE_INDEX, Batch
from models.init import init_weights
from models.registry import build_config
from trainer.data.chat.source import ChatSource
from trainer.data.collate import collate
from trainer.data.loader import RowLoader
from trainer.data.row import Rows
from trainer.micro_batch import run_micro_batches
from trainer.model_setup import build_parallel_model
from trainer.parallel.mesh import one_rank_mesh

MakeSource = Callable[..., ChatSource]
SEQ_LEN = 32
ARCH = {
    "model_type": "qwen3",
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
}


class Setup:
    """A float64 model on one rank."""

    def __init__(self) -> None:
        self.mesh = one_rank_mesh(torch.device("cpu"))
        config = ModelConfig.model_validate({"arch": ARCH, "init": {}, "optimization_dtype": "float64"})
        model_config = build_config(ARCH, tokenizer_length=None, special_ids={})
        self.model, self.grad_sync = build_parallel_model(config, model_config, seq_len=SEQ_LEN, mesh=self.mesh)
        init_weights(self.grad_sync.masters, std=0.2, seed=3, rules=self.model.init_rules())
        self.grad_sync.publish()

    def measure(self, micro_batches: list[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss, and its gradients by parameter name."""
        num_loss_tokens = sum(batch.num_loss_tokens for batch in micro_batches)
        result = run_micro_batches(self.model, micro_batches, num_loss_tokens, self.grad_sync, self.mesh)
        gradients = {name: gradient.clone() for name, gradient in self.grad_sync.gradients().items()}
        self.grad_sync.clear_gradients()
        return result.nats / result.loss_tokens, gradients


def epoch_of(source: ChatSource, micro_batch_size: int) -> list[Batch]:
    """All rows of an epoch."""
    loader = RowLoader(
        source,
        batch_size=source.num_rows,
        micro_batch_size=micro_batch_size,
        dp_rank=0,
        dp_size=1,
        num_workers=0,
        pin_memory=False,
    )
    return loader.step(0).micro_batches


def alone(ids: list[int], loss: list[int]) -> Batch:
    """One sample without padding, labelled by the definition."""
    labels = [id_ if on else IGNORE_INDEX for id_, on in zip(ids[1:], loss[1:], strict=True)]
    rows = Rows(
        input_ids=np.array([ids]),
        labels=np.array([[*labels, IGNORE_INDEX]]),
        segment_lengths=[np.array([len(ids)])],
        num_padding=np.zeros(1, np.int64),
    )
    return collate(rows, full_rows=False, pin_memory=False)


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup()


def assert_equal(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert abs(found[0] - expected[0]) < 1e-12 * expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.norm() > 0
        assert (found[1][name] - gradient).norm() < 1e-12 * gradient.norm(), name


@pytest.mark.parametrize("packing", ["best_fit", "sequential", "none"])
def test_packed_equals_one_by_one(
    setup: Setup, make_chat_source: MakeSource, random_samples: Callable[..., Any], packing: str
) -> None:
    """Field cases R05, R07: loss and gradients of all samples of an epoch, truncated ones among them, whoever shares a
    row with whom, in micro-batches of any size."""
    samples = [
        *random_samples(0, 16, shortest=3, longest=16, vocab_size=67),
        *random_samples(1, 4, shortest=16, longest=45, vocab_size=67),
    ]
    assert max(len(ids) for ids, _ in samples) > SEQ_LEN
    expected = setup.measure([alone(ids[:SEQ_LEN], loss[:SEQ_LEN]) for ids, loss in samples])
    source = make_chat_source([samples], SEQ_LEN, packing=packing, padding_id=5, shuffle=True)
    assert source.num_rows == 20 if packing == "none" else source.num_rows < 12
    for micro_batch_size in (1, source.num_rows):
        assert_equal(setup.measure(epoch_of(source, micro_batch_size)), expected)


def test_packed_pieces_of_split_samples(
    setup: Setup, make_chat_source: MakeSource, random_samples: Callable[..., Any]
) -> None:
    samples = random_samples(2, 6, shortest=40, longest=80, vocab_size=67)
    sources = [
        make_chat_source([samples], SEQ_LEN, packing=packing, overflow="split", shuffle=True)
        for packing in ("none", "best_fit")
    ]
    assert sources[1].num_rows < sources[0].num_rows
    expected, found = (setup.measure(epoch_of(source, 1)) for source in sources)
    assert_equal(found, expected)


def test_a_neighbour_changes_nothing(
    setup: Setup, make_chat_source: MakeSource, fill_rows: Callable[..., Rows], random_samples: Callable[..., Any]
) -> None:
    """Field case R07: another sample 0, and sample 1's logits differ by exactly 0."""
    (ids, loss), second, other = random_samples(0, 3, shortest=12, longest=12, vocab_size=67)
    logits = []
    for first in ((ids, loss), other):
        source = make_chat_source([[first, second]], SEQ_LEN, packing="sequential")
        batch = collate(fill_rows(source), full_rows=source.full_rows, pin_memory=False)
        with torch.no_grad():
            logits.append(setup.model.logits(batch))
    assert not torch.equal(logits[0][0, :12], logits[1][0, :12])
    assert torch.equal(logits[0][0, 12:24], logits[1][0, 12:24])
    assert np.isfinite(logits[0].numpy()).all()
