"""A real model through the training loop: trained from its weights, exported, and asked a question in transformers."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from configs.sft import SFTConfig
from trainer.run import Run, StopSignal
from trainer.train import Trainer

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def shards(smollm2_folder: Path, tmp_path: Path) -> Path:
    """The first lines of Python's documentation of `while`, so few that 20 steps see each token several times."""
    from pydoc_data.topics import topics

    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer

    folder = tmp_path / "shards"
    step = DocumentTokenizer(str(folder), str(smollm2_folder / "tokenizer.json"), eos_token="<|im_end|>", seed=0)
    assert step.tokenizer is not None  # loads it, so that the metadata can carry a name instead of this machine's path
    step.tokenizer_name_or_path = "SmolLM2-135M-Instruct"

    def documents() -> Iterator[Document]:
        yield Document(text=topics["while"][:350], id="while")

    step.run(documents())
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """Deleted at the end: pytest would keep 2 GB of checkpoints for three sessions."""
    folder = tmp_path / "run"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def _config(folder: Path, shards: Path) -> SFTConfig:
    values: dict[str, Any] = {
        "max_steps": 20,
        "model": {"name": str(folder), "compute_dtype": "float32"},
        "data": {"type": "tokens", "paths": [str(shards)], "seq_len": 32, "batch_size": 1, "micro_batch_size": 1},
        "optim": {"lr": 1e-5},
        "ckpt": {"weights": True},
    }
    return SFTConfig.model_validate(values)


def test_a_real_model_trains_and_still_answers_in_transformers(
    smollm2_folder: Path, shards: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    trainer = Trainer(_config(smollm2_folder, shards), Run(dir=run_dir, attempt=0, stop=StopSignal()))
    try:
        trainer.run()
    finally:
        trainer.close()
    del trainer
    losses = _losses(run_dir)
    assert len(losses) == 20 and all(map(math.isfinite, losses))
    assert losses[0] < 5.0, "with drawn weights it would be ln 49152 = 10.8"
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])

    exported = run_dir / "weights" / "step_20"
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    before = load_file(smollm2_folder / "model.safetensors")["model.norm.weight"].float()
    assert not torch.equal(model.state_dict()["model.norm.weight"], before)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, len(prompt) :]
    assert "Paris" in tokenizer.decode(answer)


def _losses(run_dir: Path) -> list[float]:
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record["loss/mean"] for record in records if record["step"] and "loss/mean" in record]
