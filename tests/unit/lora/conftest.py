"""A tiny base model as a Hugging Face folder, and batches for it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from configs.sft import SFTConfig
from models.base import CausalLM
from models.batch import IGNORE_INDEX, Batch
from models.hf_config import read_config
from models.registry import build_model
from trainer.data.collate import collate
from trainer.data.row import Rows
from trainer.run import Run, StopSignal
from trainer.train import Trainer
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
    """load_base(folder, dtype=torch.float32, impl="custom"): our model, or transformers' own, with its weights."""

    def load(folder: Path, dtype: torch.dtype = torch.float32, impl: str = "custom") -> CausalLM:
        model = build_model(read_config(folder), seq_len=32, attn="sdpa", dtype=dtype, impl=impl)
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


@pytest.fixture(scope="module")
def train_lora(
    tmp_path_factory: pytest.TempPathFactory, base_folder: Path, tiny_tokenizer: Path
) -> Iterator[Callable[..., Path]]:
    """train_lora("name", lora={...}, model={...}, ...): 4 steps beside the base, checkpoints at 2 and 4; gives the run
    directory. Rows are made up; the seeds of two runs of the same settings are the same."""
    folder = tmp_path_factory.mktemp("runs")
    patch = pytest.MonkeyPatch()
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        patch.setenv(name, value)
    rows = {"type": "fake", "seq_len": 8, "batch_size": 4, "micro_batch_size": 2, "num_rows": 100, "num_workers": 0}

    def train(name: str, lora: dict[str, Any] | None = None, **tables: Any) -> Path:
        adapters = {"rank": 4, "alpha": 6.0, "modules_to_save": ["lm_head"]} | (lora or {})
        model = {"name": str(base_folder), "compute_dtype": "float32", "lora": adapters} | tables.pop("model", {})
        values = {"model": model, "data": rows, "tokenizer": {"name": str(tiny_tokenizer)}}
        values |= {"output_dir": str(folder), "run": {"name": name}, "max_steps": 4, "optim": {"lr": 0.05}}
        values |= {"ckpt": {"interval": 2}, "log": {"checksum_interval": 1}}
        config = SFTConfig.model_validate(values | tables)
        (folder / name).mkdir(exist_ok=True)
        trainer = Trainer(config, Run(dir=folder / name, attempt=0, stop=StopSignal()))
        try:
            trainer.run()
        finally:
            trainer.close()
        return folder / name

    yield train
    patch.undo()
