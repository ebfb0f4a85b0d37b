"""Adapters as files of peft, and merged with their base, read back by peft and transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.batch import Batch
from models.lora import apply_lora
from trainer.checkpoint import Checkpointer
from trainer.export.command import run_export
from trainer.parallel.mesh import one_rank_mesh

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def run_dir(train_lora: Callable[..., Path]) -> Path:
    return train_lora("exported", ckpt={"interval": 2, "weights": True})


@pytest.fixture
def batch(make_batch: Any) -> Batch:
    return make_batch([[16]])


def our_logits(run_dir: Path, base: Path, load_base: Any, batch: Batch) -> Tensor:
    """Of the checkpoint's adapters beside the base, computed by our model."""
    model = load_base(base)
    options: dict[str, Any] = {"rank": 4, "alpha": 6.0, "dropout": 0.0, "target_modules": TARGETS, "seed": 0}
    apply_lora(model, **options, modules_to_save=["lm_head"], frozen_dtype=torch.float32)
    trained = {f"model.{n}": p.detach() for n, p in model.canonical_parameters().items() if p.requires_grad}
    path = run_dir / "checkpoints" / "step_4"
    Checkpointer(run_dir, None, one_rank_mesh(torch.device("cpu"))).load(path, trained, ignore=("optimizer.",))
    with torch.no_grad():
        return model.logits(batch)


def test_peft_loads_what_was_trained(
    run_dir: Path, tmp_path: Path, base_folder: Path, load_base: Any, batch: Batch, tiny_tokenizer: Path
) -> None:
    out = tmp_path / "adapters"
    assert run_export([str(run_dir), "--output-dir", str(out)]) == 0
    names = ["adapter_config.json", "adapter_model.safetensors", "oneloop.json", "tokenizer.json"]
    assert sorted(path.name for path in out.iterdir()) == [*names, "tokenizer_config.json"]
    config = json.loads((out / "adapter_config.json").read_text())
    expected = {"r": 4, "lora_alpha": 6, "peft_type": "LORA", "task_type": "CAUSAL_LM", "modules_to_save": ["lm_head"]}
    expected |= {"base_model_name_or_path": str(base_folder), "target_modules": sorted(TARGETS)}
    assert {key: config[key] for key in expected} == expected

    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    before = base(batch.input_ids).logits
    model = PeftModel.from_pretrained(base, str(out))
    stored = load_file(out / "adapter_model.safetensors")
    held = {
        name.replace(".default", "").replace(".modules_to_save", "")
        for name, _ in model.named_parameters()
        if ".lora_" in name or ".modules_to_save" in name
    }
    assert set(stored) == held
    assert "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight" in stored
    with torch.no_grad():
        found = model(batch.input_ids).logits
    torch.testing.assert_close(found, our_logits(run_dir, base_folder, load_base, batch), rtol=1e-5, atol=1e-5)
    assert (found - before).abs().max() > 0.1
    ids = AutoTokenizer.from_pretrained(tiny_tokenizer).encode("ba ko")
    assert AutoTokenizer.from_pretrained(out).encode("ba ko") == ids


def test_the_weights_beside_a_checkpoint_are_the_adapters(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "adapters"
    assert run_export([str(run_dir), "--step", "2", "--output-dir", str(out)]) == 0
    for path in out.iterdir():
        assert (run_dir / "weights" / "step_2" / path.name).read_bytes() == path.read_bytes(), path.name


def test_merged_model_computes_what_base_and_adapters_do(
    run_dir: Path, tmp_path: Path, base_folder: Path, load_base: Any, batch: Batch
) -> None:
    out = tmp_path / "merged"
    assert run_export([str(run_dir), "--output-dir", str(out), "--merge", "--max-shard-size", "20KB"]) == 0
    assert len(list(out.glob("model-*.safetensors"))) > 2
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    model, report = loaded
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        found = model(batch.input_ids).logits
    torch.testing.assert_close(found, our_logits(run_dir, base_folder, load_base, batch), rtol=1e-5, atol=1e-5)
    base = dict(AutoModelForCausalLM.from_pretrained(base_folder).named_parameters())
    for name, parameter in model.named_parameters():
        changed = name == "lm_head.weight" or "_proj" in name
        assert torch.equal(parameter, base[name]) != changed, name
    mark = json.loads((out / "oneloop.json").read_text())
    assert mark == {"step": 4, "run": "exported", "dtype": "float32", "merged_with": str(base_folder)}
    assert not [name for name in (load_file(next(out.glob("model-*")))) if "lora" in name or "base_layer" in name]


def test_merge_goes_to_a_folder_of_its_own_in_the_dtype_of_the_run(train_lora: Callable[..., Path]) -> None:
    run_dir = train_lora("narrow", lora={"modules_to_save": []}, model={"compute_dtype": "bfloat16"}, max_steps=2)
    assert run_export([str(run_dir)]) == run_export([str(run_dir), "--merge"]) == 0
    merged = load_file(run_dir / "exports" / "step_2_merged" / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    adapters = load_file(run_dir / "exports" / "step_2" / "adapter_model.safetensors")
    assert len(adapters) == 28


def test_a_base_that_moved_or_changed(
    train_lora: Callable[..., Path], write_base: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_base(tmp_path / "base", dtype=torch.float32)
    run_dir = train_lora("moved", model={"name": str(base)}, max_steps=2)
    moved = base.rename(tmp_path / "elsewhere")
    assert run_export([str(run_dir), "--merge"]) == 2
    assert "--base says where it lies now" in capsys.readouterr().err
    assert run_export([str(run_dir), "--base", str(moved)]) == 0
    config = json.loads((run_dir / "exports" / "step_2" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(moved)
    assert run_export([str(run_dir), "--merge", "--base", str(moved), "--clean"]) == 0

    shutil.rmtree(moved)
    write_base(moved, dtype=torch.bfloat16)
    for arguments in (["--merge"], []):
        assert run_export([str(run_dir), *arguments, "--base", str(moved), "--clean"]) == 2
        assert "are not those that the adapters were trained beside" in capsys.readouterr().err


def test_nothing_to_merge(
    train_lora: Callable[..., Path], base_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train_lora("whole", model={"lora": None}, max_steps=2)
    for arguments, key in ((["--merge"], "merge"), (["--base", str(base_folder)], "base")):
        assert run_export([str(whole), *arguments]) == 2
        error = capsys.readouterr().err
        assert key in error
        assert "holds a whole model, no adapters" in error
