"""A model that transformers alone implements, through the real command on two ranks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Olmo2Config

from configs.sft import SFTConfig
from trainer.export.command import run_export
from trainer.run import Run, StopSignal
from trainer.train import Trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that two ranks share unevenly."""
    torch.manual_seed(0)
    config = Olmo2Config(
        vocab_size=301,
        hidden_size=30,
        intermediate_size=47,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    folder = tmp_path_factory.mktemp("models") / "olmo2"
    model.save_pretrained(folder)
    return folder


def test_two_ranks_learn_what_one_learns_and_goes_on_with(runner, folder, monkeypatch, tmp_path):
    """FSDP units, buffers on each rank (field case R92), a tied head (R70), fp32 masters of one dtype (R86); a
    checkpoint of two ranks goes on with one; the export answers in transformers."""
    options = "--model.arch None --no-model.init --no-val --scheduler.type constant --optim.lr 1e-3 --ckpt.interval 2"
    run_options = [*options.split(), "--model.ac.mode", "full", "--model.impl", "hf", "--model.name", str(folder)]
    done = runner.run(runner.config("transformers", steps=4), *run_options, ranks=2)
    assert 'model: olmo2, transformers\' own, with attention inside documents (model.impl = "hf")' in done.output

    config = SFTConfig.model_validate_json((done.dir / "configs" / "sft.json").read_text())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    losses = {}
    for name, resume in (("alone", None), ("gone_on", {"dir": str(done.dir), "step": 2})):
        values = json.loads(config.model_dump_json()) | {"resume": resume}
        run_dir = runner.folder / f"transformers_{name}"
        run_dir.mkdir()
        trainer = Trainer(SFTConfig.model_validate(values), Run(dir=run_dir, attempt=0, stop=StopSignal()))
        try:
            trainer.run()
        finally:
            trainer.close()
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [record["loss/mean"] for record in records if record["step"]]
    expected = done.column("loss/mean")
    assert len(expected) == 4 and expected[-1] < expected[0]
    assert losses["alone"] == pytest.approx(expected, rel=1e-6)
    assert losses["gone_on"] == pytest.approx(expected[2:], rel=1e-6)

    out = tmp_path / "out"
    assert run_export([str(done.dir), "--output-dir", str(out), "--dtype", "float32"]) == 0
    assert load_file(out / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    weights = {name.removeprefix("model."): tensor for name, tensor in done.tensors(4).items()}
    exported = AutoModelForCausalLM.from_pretrained(out)
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, weights[name]), name
