"""Nothing of a step is drawn from the process's random numbers, so checkpoints need not carry them."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.sft import SFTConfig
from trainer.run import Run, StopSignal
from trainer.train import Trainer

ARCH = {"model_type": "llama", "vocab_size": 67, "hidden_size": 16, "intermediate_size": 24}
ARCH |= {"num_hidden_layers": 1, "num_attention_heads": 2}


def run(folder: Path, name: str, seed: int, steps: int, **tables: object) -> dict[str, torch.Tensor]:
    data = {"type": "fake", "seq_len": 8, "batch_size": 2, "num_rows": 100, "num_workers": 0, "input_ids": "random"}
    values = {"model": {"arch": ARCH, "init": {}}, "data": data, "output_dir": str(folder), "run": {"name": name}}
    config = SFTConfig.model_validate(values | {"max_steps": steps, "ckpt": {"interval": 2}} | tables)
    (folder / name).mkdir(exist_ok=True)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    trainer = Trainer(config, Run(dir=folder / name, attempt=0, stop=StopSignal()))
    try:
        trainer.run()
        return {name: master.clone() for name, master in trainer.grad_sync.masters.items()}
    finally:
        trainer.close()


def test_resumed_under_other_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case R74: no state of a random generator can come from another rank, since none is kept or used."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    whole = run(tmp_path, "whole", 1, 4)
    run(tmp_path, "halves", 2, 2)
    halves = run(tmp_path, "halves", 3, 4, resume={})
    assert all(torch.equal(halves[name], master) for name, master in whole.items())
