"""Runs with [model.lora] through the real command: ranks change nothing, and neither does a resume on fewer of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from configs.sft import SFTConfig
from trainer.export.command import run_export
from trainer.run import Run, StopSignal
from trainer.train import Trainer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 model whose sizes two ranks share unevenly."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=301,
        hidden_size=30,
        intermediate_size=47,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=10,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    model.save_pretrained(folder)
    return folder


def _options(base: Path) -> list[str]:
    lines = (
        "--model.arch None --no-model.init --scheduler.type constant --optim.lr 1e-2 --no-val",
        "--model.compute-dtype float64 --model.optimization-dtype float64 --model.defer-grad-sync --model.ac.mode full",
        "--model.lora.rank 3 --model.lora.modules-to-save model.norm",
    )
    return [*" ".join(lines).split(), "--model.name", str(base)]


@pytest.fixture
def alone(runner, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """alone(config of a run, name, **changes): the run anew in this process, on one rank; gives its directory."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")

    def train(config: SFTConfig, name: str, **changes) -> Path:
        folder = runner.folder / name
        folder.mkdir(exist_ok=True)
        trainer = Trainer(
            SFTConfig.model_validate(config.model_dump() | changes), Run(dir=folder, attempt=0, stop=StopSignal())
        )
        try:
            trainer.run()
        finally:
            trainer.close()
        return folder

    return train


def _losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss/mean"] for record in records if "loss/mean" in record]


def test_two_ranks_train_the_adapters_that_one_trains(runner, base, alone, tmp_path) -> None:
    """In float64, with activation checkpointing and deferred reduction; checkpoints of either are those of both."""
    done = runner.run(runner.config("lora", steps=4, interval=2), *_options(base), ranks=2)
    assert f"weights: from {base}, 25 tensors, " in done.output
    assert "adapters: drawn from model.lora.seed 0, 14 layers" in done.output
    config = SFTConfig.model_validate_json((done.dir / "configs" / "sft.json").read_text())
    single = alone(config, "lora_alone")
    losses = done.column("loss/mean")
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.05
    assert losses == pytest.approx(_losses(single), rel=1e-12)

    half = runner.folder / "lora_half"
    shutil.copytree(done.dir / "checkpoints" / "step_2", half / "checkpoints" / "step_2")
    alone(config, "lora_half", resume={"step": 2})
    assert _losses(half)[-2:] == pytest.approx(losses[2:], rel=1e-12)

    tensors = done.tensors(4)
    assert len([name for name in tensors if name.startswith("model.")]) == 29
    assert {tensor.dtype for name, tensor in tensors.items() if ".step." not in name} == {torch.float64}
    arguments = ["--merge", "--output-dir", str(tmp_path / "merged")]
    assert run_export([str(done.dir), *arguments]) == 0
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    model, report = loaded
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before = dict(AutoModelForCausalLM.from_pretrained(base).named_parameters())
    name = "model.layers.1.mlp.down_proj"
    up, down = (tensors[f"model.{name}.lora_{matrix}.weight"] for matrix in "BA")
    expected = before[f"{name}.weight"].double() + 32.0 / 3 * up @ down
    torch.testing.assert_close(dict(model.named_parameters())[f"{name}.weight"], expected.float())
