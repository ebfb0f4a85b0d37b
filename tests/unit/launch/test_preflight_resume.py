"""What a resume cannot do shows before anything is started, and in a dry run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.checkpoint import CheckpointConfig
from configs.errors import ConfigError
from configs.sft import SFTConfig
from models.registry import build_model
from trainer.checkpoint import Checkpointer
from trainer.checkpoint.manifest import file_records, read_manifest, write_manifest
from trainer.data.loader import RowLoader
from trainer.errors import RunError
from trainer.parallel.mesh import one_rank_mesh
from trainer.preflight import preflight, prepare
from trainer.state import STATE_KEYS, model_record

_ARCH = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
_DATA = {"type": "fake", "seq_len": 8, "batch_size": 2}


def _config(**values: Any) -> SFTConfig:
    base = {"data": _DATA, "model": {"arch": _ARCH}, "max_steps": 10, "run": {"name": "one"}, "resume": {}}
    return SFTConfig.model_validate(base | values)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run with a checkpoint of step 6."""
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    run_dir.mkdir()
    inputs = prepare(_config())
    model = build_model(inputs.model_config, seq_len=8, attn="sdpa", dtype=torch.float32)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    loader = RowLoader(
        inputs.source, batch_size=2, micro_batch_size=1, dp_rank=0, dp_size=1, num_workers=0, pin_memory=False
    )
    record = model_record(_config(), inputs.model_config, has_tokenizer=False)
    mesh = one_rank_mesh(torch.device("cpu"))
    checkpointer = Checkpointer(run_dir, CheckpointConfig(async_save=False), mesh, record)
    state = dict.fromkeys(STATE_KEYS) | {"progress": {"step": 6}, "data": loader.state_dict(6)}
    checkpointer.save(6, tensors, state)
    return run_dir


def _faults(config: SFTConfig, run_dir: Path) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        preflight(config, run_dir=run_dir, world_size=1, say=lambda text: None)
    return [(fault.key, fault.message) for fault in caught.value.faults]


def test_resume_that_fits(run_dir: Path) -> None:
    said: list[str] = []
    preflight(_config(), run_dir=run_dir, world_size=1, say=said.append)
    assert said == [f"resume: from {run_dir}/checkpoints/step_6"]
    preflight(_config(max_steps=6), run_dir=run_dir, world_size=1, say=said.append)


@pytest.mark.parametrize("fork", [True, False])
def test_only_the_own_folder_is_repaired(run_dir: Path, tmp_path: Path, fork: bool) -> None:
    """The run that is forked may be alive, and between the two renames with which it replaces a checkpoint."""
    run = tmp_path / "one"
    shutil.copytree(run_dir, run)
    folder = run / "checkpoints"
    (folder / "step_6").rename(folder / ".step_6.old")
    config = _config(resume={"dir": str(run)} if fork else {})
    if fork:
        assert [key for key, _ in _faults(config, tmp_path / "two")] == ["resume"]
        own = Checkpointer(tmp_path / "two", CheckpointConfig(), one_rank_mesh(torch.device("cpu")))
        with pytest.raises(RunError, match="there is no checkpoint in "):
            own.find(run)
    else:
        preflight(config, run_dir=run, world_size=1, say=lambda text: None)
    assert [path.name for path in folder.iterdir()] == [".step_6.old" if fork else "step_6"]


def test_run_shorter_than_its_checkpoint(run_dir: Path) -> None:
    path = run_dir / "checkpoints" / "step_6"
    assert _faults(_config(max_steps=5), run_dir) == [("max_steps", f"the run has 5 steps, fewer than the 6 of {path}")]
    data = _DATA | {"max_epochs": 1, "num_rows": 10}
    keys = [key for key, _ in _faults(_config(max_steps=None, data=data, ckpt={"skip_dataloader": True}), run_dir)]
    assert keys == ["data.max_epochs"]
    preflight(_config(max_steps=5, ckpt={"skip_progress": True}), run_dir=run_dir, world_size=1, say=lambda text: None)


def test_other_data(run_dir: Path) -> None:
    other = _DATA | {"seed": 3}
    message = "the data is not that of the checkpoint: seed was 0 and is 3. Start a new run instead"
    assert _faults(_config(data=other), run_dir) == [("resume", message)]
    skips = {"skip_dataloader": True}
    preflight(_config(data=other, ckpt=skips), run_dir=run_dir, world_size=1, say=lambda text: None)


def test_other_model(run_dir: Path) -> None:
    [(key, message)] = _faults(_config(model={"arch": _ARCH | {"intermediate_size": 48}}), run_dir)
    assert key == "resume"
    assert "mlp.gate_proj.weight is (32, 16) float32, this run has (48, 16) float32" in message


def test_another_computation_on_the_same_weights_is_said(run_dir: Path) -> None:
    """The weights fit a model of another RoPE: meant, or a folder of `model.name` that changed meanwhile."""
    said: list[str] = []
    model = {"arch": _ARCH | {"rms_norm_eps": 1e-5, "rope_theta": 500000.0}, "compute_dtype": "float32"}
    preflight(_config(model=model), run_dir=run_dir, world_size=1, say=said.append)
    assert said[0] == f"resume: from {run_dir}/checkpoints/step_6"
    assert sorted(said[1:]) == [
        'model: compute_dtype is "float32", and "bfloat16" in the checkpoint',
        "model: rms_norm_eps is 1e-05, and 1e-06 in the checkpoint",
        'model: rope_parameters is {"rope_theta": 500000.0, "rope_type": "default"}, and {"rope_theta": 10000.0, '
        '"rope_type": "default"} in the checkpoint',
    ]


def test_schedule_that_starts_anew_must_fit_in_the_steps_left(run_dir: Path) -> None:
    scheduler = {"type": "linear", "warmup_steps": 2, "decay_steps": 3}
    preflight(_config(scheduler=scheduler), run_dir=run_dir, world_size=1, say=lambda text: None)
    assert _faults(_config(scheduler=scheduler, ckpt={"skip_scheduler": True}), run_dir) == [
        ("scheduler.decay_steps", "warmup_steps + decay_steps = 2 + 3 is longer than the run of 4 steps")
    ]


def test_state_of_another_version(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path / "one")
    path = tmp_path / "one" / "checkpoints" / "step_6"
    manifest = read_manifest(path)
    state = {key: value for key, value in manifest["state"].items() if key != "data"}
    write_manifest(path, step=6, state=state, files=file_records(manifest))
    message = f"the state.json of {path} is of another version: it lacks ['data']"
    assert _faults(_config(), tmp_path / "one") == [("resume", message)]
