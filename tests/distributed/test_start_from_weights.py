"""Runs that start from the weights of a Hugging Face folder, through the real command on several ranks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from configs.sft import SFTConfig
from trainer.run import Run, StopSignal
from trainer.train import Trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 model in several files, of sizes that two ranks share unevenly; the tokenizer has three more ids."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=297,
        hidden_size=30,
        intermediate_size=47,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=10,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


def _options(folder: Path) -> list[str]:
    changes = "--model.arch None --no-model.init --no-ckpt --no-val --scheduler.type constant --optim.lr 1e-3"
    return [*changes.split(), "--model.name", str(folder), "--model.vocab-multiple", "7"]


def test_two_ranks_learn_what_one_learns(runner, folder, monkeypatch):
    """Field cases R70, R84, R86: bf16 files, fp32 masters of one dtype, a tied head that grows, uneven shards."""
    done = runner.run(runner.config("from_weights", steps=3), *_options(folder), ranks=2)
    assert f"weights: from {folder}, 24 tensors, " in done.output
    assert "rows 297 to 300 of model.embed_tokens.weight are new, each the mean of the 297 before" in done.output
    config = SFTConfig.model_validate_json((done.dir / "configs" / "sft.json").read_text())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    alone = runner.folder / "from_weights_alone"
    alone.mkdir()
    trainer = Trainer(config, Run(dir=alone, attempt=0, stop=StopSignal()))
    try:
        assert {master.dtype for master in trainer.grad_sync.masters.values()} == {torch.float32}
        trainer.run()
    finally:
        trainer.close()
    records = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss/mean"] for record in records if record["step"]]
    assert len(losses) == 3
    assert done.column("loss/mean") == pytest.approx(losses, rel=1e-6)


def test_a_fault_that_one_rank_sees_ends_all(runner, folder):
    """The last row of the embedding is the second rank's; the first one must not wait for it."""
    (path,) = [path for path in folder.glob("model-*") if "model.embed_tokens.weight" in load_file(path)]
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][-1, -1] = float("nan")
    save_file(tensors, path)
    done = runner.run(runner.config("not_finite", steps=3), *_options(folder), ranks=2, check=False)
    assert done.returncode == 1
    assert f"{path}: model.embed_tokens.weight holds values that are not finite in torch.float32" in done.output
    assert "Traceback" not in done.output
