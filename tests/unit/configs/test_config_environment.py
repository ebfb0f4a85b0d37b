import os
from pathlib import Path

import pytest

from configs.cli import resolve
from configs.sft import SFTConfig

ARGV = ["--data.type=fake", "--model.arch.model_type=llama", "--model.init", "--max-steps=1", "--monitors.wandb"]


def test_building_a_config_changes_no_environment_variable():
    """Field case R113: one config object must not change another through the environment."""
    before = dict(os.environ)
    config = resolve([*ARGV, "--model.compute-dtype=float32", "--deployment.num-train-gpus=2"]).config
    SFTConfig.model_validate_json(config.model_dump_json())
    assert dict(os.environ) == before


def test_no_environment_variable_changes_a_config(monkeypatch: pytest.MonkeyPatch):
    """Field case R113: nothing in a config is read from the environment, so there is nothing hidden to show."""
    expected = resolve(ARGV).config
    for name in ("MAX_STEPS", "SFT_MAX_STEPS", "WANDB_PROJECT", "WANDB_MODE", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE"):
        monkeypatch.setenv(name, "7")
    assert resolve(ARGV).config == expected


def test_one_config_does_not_change_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Field case R113: two configs side by side stay what each alone is."""
    monkeypatch.chdir(tmp_path)
    first = resolve(ARGV).config
    text = first.model_dump_json()
    second = resolve([*ARGV, "--model.arch.hidden_size=3", "--monitors.wandb.tags", "a", "--optim.lr=1"]).config
    assert first.model_dump_json() == text
    assert second.model.arch == {"model_type": "llama", "hidden_size": 3}
    assert resolve(ARGV).config == first
