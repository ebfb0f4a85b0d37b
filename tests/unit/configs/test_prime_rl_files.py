"""SPEC 2: files written with prime-rl's keys parse as they are, and each value arrives."""

from pathlib import Path
from typing import Any

import pytest
import tomli

from configs.cli import render_error, resolve
from configs.errors import ConfigError
from configs.schema import flatten
from configs.sft import SFTConfig

FOLDER = Path(__file__).parent / "prime_rl"


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sft(name: str, *flags: str) -> SFTConfig:
    resolved = resolve(["@", str(FOLDER / name), *flags])
    assert resolved.notes == []
    assert isinstance(resolved.config, SFTConfig)
    return resolved.config


@pytest.mark.parametrize(("name", "count"), [("full.toml", 60), ("resumed.toml", 13)])
def test_each_value_arrives(name: str, count: int):
    given: dict[str, Any] = flatten(tomli.loads((FOLDER / name).read_text()))
    config = sft(name)
    found = flatten(config.model_dump(mode="json"))
    values = {key: value for key, value in given.items() if value != {}}
    assert {key: found[key] for key in values} == values
    assert len(values) >= count
    assert SFTConfig.model_validate_json(config.model_dump_json()) == config


def test_what_the_short_file_leaves_out():
    config = sft("resumed.toml")
    assert (config.data.type, config.ckpt is not None, config.val) == ("sft", True, None)
    assert config.deployment.type == "single_node"


def test_offline_is_a_mode_of_wandb():
    wandb = sft("full.toml").monitors.wandb
    assert wandb is not None and wandb.resolved_mode == "offline"
    wandb = sft("full.toml", "--no-monitors.wandb.offline").monitors.wandb
    assert wandb is not None and wandb.resolved_mode == "online"


@pytest.mark.parametrize(
    ("flag", "most"),
    [("num_infer_gpus=1", 0), ("num_infer_nodes=2", 0), ("num_infer_replicas=2", 1)],
)
def test_inference_is_refused(flag: str, most: int):
    key, value = flag.split("=")
    with pytest.raises(ConfigError) as caught:
        sft("resumed.toml", f"--deployment.{flag}")
    assert render_error(caught.value) == (
        f"deployment.{key} (flag --deployment.{key}): {value} asks for inference, and none runs beside the training "
        f"here: set it to {most} or leave it out; held-out data is scored by [val]"
    )
    sft("resumed.toml", f"--deployment.{key}={most}")


def test_the_machine_has_as_many_gpus_as_are_asked_for():
    with pytest.raises(ConfigError) as caught:
        sft("full.toml", "--deployment.gpus-per-node", "4")
    assert render_error(caught.value) == (
        f"deployment.num_train_gpus ({FOLDER / 'full.toml'}): 8 is more than gpus_per_node = 4"
    )
