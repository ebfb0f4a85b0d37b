"""Tiny models and packed batches for the tests of models."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from models.base import CausalLM
from models.batch import IGNORE_INDEX, Batch
from models.init import init_weights
from models.registry import build_config, build_model
from trainer.data.collate import collate
from trainer.data.row import Rows

VOCAB = 96
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rope_theta": 1000.0,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """make_batch(lengths per row, seed=0, padding=0): random ids, labels shifted inside the row, some ignored."""

    def make(rows: list[list[int]], *, seed: int = 0, padding: int = 0, full_rows: bool = False) -> Batch:
        generator = np.random.default_rng(seed)
        seq_len = sum(rows[0])
        made = Rows.empty(len(rows), seq_len)
        tokens = generator.integers(0, VOCAB, (len(rows), seq_len + 1))
        made.input_ids[:], made.labels[:] = tokens[:, :-1], tokens[:, 1:]
        made.labels[:, ::5] = IGNORE_INDEX
        made.segment_lengths = [np.array(lengths) for lengths in rows]
        if padding:
            made.labels[-1, -padding:] = IGNORE_INDEX
            made.num_padding[-1] = padding
        return collate(made, full_rows=full_rows, pin_memory=False)

    return make


@pytest.fixture
def make_model() -> Callable[..., CausalLM]:
    """make_model(model_type="llama", dtype=..., **arch): a tiny model with weights large enough to matter."""

    def make(model_type: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **arch: Any) -> CausalLM:
        config = build_config({"model_type": model_type, **TINY, **arch}, tokenizer_length=None, special_ids={})
        with torch.device("meta"):
            model = build_model(config, seq_len=64, attn="sdpa", dtype=dtype)
        model.to_empty(device="cpu")
        parameters = dict(model.named_parameters())
        init_weights(parameters, std=0.3, seed=seed, rules=model.init_rules())
        # Norm gains of 1 and biases of 0 would hide a gain or a bias that is left out.
        with torch.no_grad():
            for index, parameter in enumerate(parameters.values()):
                if parameter.dim() == 1:
                    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
                    parameter.add_(0.2 * noise.to(dtype))
        return model

    return make
