"""Tiny Hugging Face models in folders, as transformers writes them, and runs that start from them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from configs.sft import SFTConfig
from trainer.run import Run, StopSignal
from trainer.train import Trainer

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., PreTrainedModel]:
    """save_model(model_type="llama", name="hf", dtype=..., max_shard_size=..., **arch): saves a random model in
    `tmp_path / name`, gives it."""

    def save(
        model_type: str = "llama",
        *,
        name: str = "hf",
        dtype: torch.dtype = torch.float32,
        max_shard_size: str = "1GB",
        **arch: Any,
    ) -> PreTrainedModel:
        torch.manual_seed(3)
        config = AutoConfig.for_model(model_type, **(TINY | arch))
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
        model.save_pretrained(tmp_path / name, max_shard_size=max_shard_size)
        return model

    return save


@pytest.fixture
def run_config(tmp_path: Path) -> Callable[..., SFTConfig]:
    """run_config(model={...}, run_name="one", **tables): 3 steps of a model in `tmp_path / "hf"` on made-up rows."""

    def make(*, model: dict[str, Any] | None = None, run_name: str = "one", **tables: Any) -> SFTConfig:
        data = {"seq_len": 12, "batch_size": 4, "micro_batch_size": 1, "num_workers": 0}
        data |= tables.pop("data", {"type": "fake", "input_ids": "random"})
        values = {
            "model": {"name": str(tmp_path / "hf"), "compute_dtype": "float32"} | (model or {}),
            "data": data,
            "output_dir": str(tmp_path / "runs"),
            "run": {"name": run_name},
            "max_steps": 3,
        }
        return SFTConfig.model_validate(values | tables)

    return make


@pytest.fixture
def make_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[SFTConfig], Trainer]:
    """make_trainer(config): rank 0 of 1 in this process, with its first weights."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")

    def make(config: SFTConfig) -> Trainer:
        run_dir = tmp_path / "runs" / str(config.run.name)
        run_dir.mkdir(parents=True, exist_ok=True)
        return Trainer(config, Run(dir=run_dir, attempt=0, stop=StopSignal()))

    return make


@pytest.fixture
def run_losses(make_trainer: Callable[[SFTConfig], Trainer]) -> Callable[[SFTConfig], list[float]]:
    """run_losses(config): the losses of a whole run in this process."""

    def run(config: SFTConfig) -> list[float]:
        trainer = make_trainer(config)
        try:
            trainer.run()
        finally:
            trainer.close()
        lines = (trainer.run_info.dir / "metrics.jsonl").read_text().splitlines()
        return [record["loss/mean"] for record in map(json.loads, lines) if record["step"]]

    return run
