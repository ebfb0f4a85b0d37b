"""Nothing random is stored, because nothing random is drawn from a global generator."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.base import CausalLM
from models.init import init_weights
from models.registry import build_config, build_model
from trainer.data.fake import FakeSource
from trainer.data.loader import RowLoader
from trainer.data.row import RowSource
from trainer.data.tokens import TokensSource

ARCH = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def global_states() -> list[Any]:
    return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def one_step(source: RowSource, model: CausalLM) -> list[torch.Tensor]:
    """Rows, first weights, loss and gradients of a step."""
    loader = RowLoader(source, batch_size=4, micro_batch_size=4, dp_rank=0, dp_size=1, num_workers=2, pin_memory=False)
    batch = loader.step(7).micro_batches[0]
    loader.close()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    init_weights(weights, std=0.1, seed=0, rules=model.init_rules())
    model.zero_grad()
    loss = model(batch).loss
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [batch.input_ids, *(weight.clone() for weight in weights.values()), loss.detach(), *gradients]


@pytest.mark.parametrize("kind", ["tokens", "fake"])
def test_a_step_neither_reads_nor_moves_global_generators(
    kind: str, tiny_shards: Path, make_source: Callable[..., TokensSource]
) -> None:
    """Field case R74: random numbers come from seed, names and positions alone, so that no rank can restore those of
    another. Bit-equal resumes on one and several ranks: tests/distributed/test_run_equivalence.py,
    test_run_faults.py and test_gradient_equivalence.py."""
    source: RowSource
    if kind == "tokens":
        source = make_source([tiny_shards], 32)
    else:
        source = FakeSource(seq_len=32, vocab_size=300, seed=0, num_rows=99, length="variable", input_ids="random")
    config = build_config(ARCH, tokenizer_length=300, special_ids={})
    model = build_model(config, seq_len=32, attn="sdpa", dtype=torch.float32)
    results = []
    for seed in (1, 2):
        seed_all(seed)
        before = global_states()
        results.append(one_step(source, model))
        assert global_states() == before
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
