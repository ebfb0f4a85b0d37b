"""A tiny base model as a Hugging Face folder, and batches for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from models.base import CausalLM
from models.batch import IGNORE_INDEX, Batch
from models.hf_config import read_config
from models.registry import build_model
from trainer.data.collate import collate
from trainer.data.row import Rows
from trainer.weights.load import load_weights

VOCAB = 384
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _write_base(folder: Path, *, dtype: torch.dtype, **changes: Any) -> Path:
    fields = SIZES | changes
    config = LlamaConfig(**fields) if fields.pop("model_type", "qwen3") == "llama" else Qwen3Config(**fields)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2, generator=generator)
    model.save_pretrained(folder, max_shard_size="10KB")
    return folder


@pytest.fixture(scope="session")
def write_base() -> Callable[..., Path]:
    """write_base(folder, dtype=torch.float32, **fields of its config): a model in several files."""
    return _write_base


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied qwen3 in float32."""
    return _write_base(tmp_path_factory.mktemp("base") / "qwen3", dtype=torch.float32)


@pytest.fixture
def load_base() -> Callable[..., CausalLM]:
    """load_base(folder, dtype=torch.float32): our model with its weights."""

    def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
        model = build_model(read_config(folder), seq_len=32, attn="sdpa", dtype=dtype)
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        load_weights(folder, parameters, tied=model.tied_names, show_progress=False)
        return model

    return load


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """make_batch(lengths per row, seed=0): random ids, labels shifted inside the row."""

    def make(rows: list[list[int]], *, seed: int = 0) -> Batch:
        generator = np.random.default_rng(seed)
        made = Rows.empty(len(rows), sum(rows[0]))
        tokens = generator.integers(0, VOCAB, (len(rows), sum(rows[0]) + 1))
        made.input_ids[:], made.labels[:] = tokens[:, :-1], tokens[:, 1:]
        made.labels[:, ::5] = IGNORE_INDEX
        made.segment_lengths = [np.array(lengths) for lengths in rows]
        return collate(made, full_rows=len(rows[0]) == 1, pin_memory=False)

    return make
