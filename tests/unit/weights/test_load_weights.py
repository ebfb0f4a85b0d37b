"""Weights of a Hugging Face folder in a run: the same numbers, streamed, checked."""

import gc
import logging
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.hf_config import CONFIG_CLASSES
from trainer.errors import RunError
from trainer.weights import folder, load
from trainer.weights.load import load_weights

EMBEDDING = "model.embed_tokens.weight"


def _close(trainer) -> dict[str, Tensor]:
    trainer.close()
    return trainer.grad_sync.masters


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", CONFIG_CLASSES)
def test_masters_and_first_loss_are_those_of_transformers(
    model_type, tied, save_model, run_config, make_trainer, run_losses
):
    twin = save_model(model_type, tie_word_embeddings=tied)
    config = run_config(max_steps=1)
    trainer = make_trainer(config)
    batches = trainer.loader.step(0).micro_batches
    masters = _close(trainer)
    expected = dict(twin.named_parameters())
    assert masters.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(masters[name], expected[name])] == []

    nats, tokens = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            logits = twin(input_ids=batch.input_ids).logits.double()
            nats += torch.nn.functional.cross_entropy(logits[0], batch.labels[0], reduction="sum").item()
            tokens += int((batch.labels != -100).sum())
    assert run_losses(config) == [pytest.approx(nats / tokens, rel=1e-6)]


def test_a_sharded_folder_is_read_like_a_single_file(tmp_path, save_model, run_config, make_trainer):
    save_model(name="single")
    save_model(max_shard_size="5KB")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    loaded = [_close(make_trainer(run_config(model={"name": str(tmp_path / name)}))) for name in ("single", "hf")]
    assert loaded[0].keys() == loaded[1].keys()
    assert all(torch.equal(loaded[0][name], loaded[1][name]) for name in loaded[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_masters_are_fp32_whatever_the_file_holds(dtype, tmp_path, save_model, run_config, make_trainer):
    """Field cases R84 and R86: all masters, norms too, have the one dtype of model.optimization_dtype."""
    save_model(dtype=dtype)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    trainer = make_trainer(run_config(model={"compute_dtype": "bfloat16"}))
    masters = _close(trainer)
    assert {master.dtype for master in masters.values()} == {torch.float32}
    assert all(torch.equal(masters[name], stored[name].float()) for name in masters)
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}
    assert all(torch.equal(copy, masters[name].bfloat16()) for name, copy in trainer.model.named_parameters())


def test_a_tied_head_in_the_file_must_be_the_embedding(tmp_path, save_model, run_config, make_trainer):
    """Field case R70: config and file that disagree on the tie are an error that says so."""
    save_model(tie_word_embeddings=True)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors[EMBEDDING].clone()}, path)
    masters = _close(make_trainer(run_config()))
    assert "lm_head.weight" not in masters and torch.equal(masters[EMBEDDING], tensors[EMBEDDING])

    head = tensors[EMBEDDING].clone()
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, path)
    with pytest.raises(RunError, match=r"model.safetensors: lm_head.weight differs from the embedding, and config.js"):
        make_trainer(run_config())


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), torch.bfloat16), (float("-inf"), torch.float32)])
def test_values_that_are_not_finite_are_refused(value, dtype, tmp_path, save_model, run_config, make_trainer):
    save_model(dtype=dtype)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, path)
    with pytest.raises(RunError) as error:
        make_trainer(run_config())
    assert (
        str(error.value)
        == f"{path}: model.layers.1.mlp.up_proj.weight holds values that are not finite in torch.float32"
    )


def test_files_that_change_after_the_check_are_refused(tmp_path, save_model):
    model = save_model()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if name != EMBEDDING}, path)
    with pytest.raises(RunError, match=f"hf does not hold {EMBEDDING}$"):
        load_weights(tmp_path / "hf", parameters, tied={}, show_progress=False)
    save_file(tensors | {EMBEDDING: tensors[EMBEDDING][1:].contiguous()}, path)
    with pytest.raises(RunError, match=r"is of shape \(63, 16\), and the model's is \(64, 16\)"):
        load_weights(tmp_path / "hf", parameters, tied={}, show_progress=False)


def test_the_log_says_where_the_weights_are_from(tmp_path, save_model, run_config, make_trainer, caplog):
    """Field case R73: one thing decides, and it is said which."""
    caplog.set_level(logging.INFO)
    model = save_model()
    make_trainer(run_config()).close()
    size = sum(parameter.numel() for parameter in model.parameters()) * 4
    line = f"weights: from {tmp_path / 'hf'}, {len(list(model.parameters()))} tensors, {size / 1e9:.3g} GB"
    assert [record.message for record in caplog.records if record.message.startswith("weights")] == [line]
    matrices = sum(parameter.dim() == 2 for parameter in model.parameters())
    groups = [message for message in caplog.messages if message.startswith("optimizer: ")]
    assert [group.count(f" {matrices} tensors with weight decay ") for group in groups] == [1]  # field case R80


def test_init_takes_the_architecture_and_none_of_the_weights(tmp_path, save_model, run_config, make_trainer, caplog):
    caplog.set_level(logging.INFO)
    twin = save_model("qwen3", num_hidden_layers=1)
    (tmp_path / "hf" / "model.safetensors").unlink()
    masters = _close(make_trainer(run_config(model={"init": {"std": 0.5, "seed": 1}})))
    assert {name: master.shape for name, master in masters.items()} == {
        name: parameter.shape for name, parameter in twin.named_parameters()
    }
    assert masters[EMBEDDING].std().item() == pytest.approx(0.5, rel=0.1)
    assert "weights: drawn from [model.init], std 0.5, seed 1" in caplog.messages


def test_a_resumed_run_needs_no_weight_files(tmp_path, save_model, run_config, run_losses, caplog):
    """Field case R73: the checkpoint's weights, not those of the folder that changed meanwhile; the log says so."""
    caplog.set_level(logging.INFO)
    save_model(max_shard_size="5KB")
    whole = run_losses(run_config(ckpt={"interval": 2}))
    for path in (tmp_path / "hf").glob("model*"):
        path.unlink()
    fork = {"dir": str(tmp_path / "runs" / "one"), "step": 2}
    assert run_losses(run_config(run_name="two", resume=fork)) == whole[2:]
    path = tmp_path / "runs" / "one" / "checkpoints" / "step_2"
    assert (
        f"weights: from checkpoint {path}, after step 2; those of {tmp_path / 'hf'} are not loaded" in caplog.messages
    )


def test_fewer_layers_are_loaded_for_a_quick_look(save_model, run_config, make_trainer):
    twin = save_model("smollm3", num_hidden_layers=4)
    masters = _close(make_trainer(run_config(model={"debug": {"num_layers": 1}})))
    expected = dict(twin.named_parameters())
    assert list(masters) == [name for name in expected if "layers." not in name or "layers.0." in name]
    assert all(torch.equal(masters[name], expected[name]) for name in masters)


def test_random_init_touches_no_weights_and_says_so(tmp_path, save_model, run_config, run_losses, caplog):
    save_model()
    (tmp_path / "hf" / "model.safetensors").unlink()
    losses = run_losses(run_config(model={"debug": {"random_init": True}}))
    assert len(losses) == 3 and all(0 < loss < 10 for loss in losses)
    (warning,) = [record for record in caplog.records if record.message.startswith("weights")]
    assert warning.levelno == logging.WARNING and "losses mean nothing" in warning.message


def test_a_large_model_on_a_terminal_gets_a_bar(tmp_path, save_model, monkeypatch):
    steps = []

    class Bar:
        def __init__(self, **kwargs):
            steps.append(kwargs)

        def update(self, completed):
            steps.append(completed)

        def close(self):
            steps.append("closed")

    model = save_model()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    monkeypatch.setattr(load, "ProgressBar", Bar)
    load_weights(tmp_path / "hf", parameters, tied={}, show_progress=True)
    assert steps == []
    monkeypatch.setattr(load, "_BAR_BYTES", 1)
    load_weights(tmp_path / "hf", parameters, tied={}, show_progress=False)
    assert steps == []
    load_weights(tmp_path / "hf", parameters, tied={}, show_progress=True)
    assert steps[0] == {"description": "loading weights (MB)", "total": 0}
    assert steps[-1] == "closed" and len(steps) == 2 + len(parameters)


def _peak_mib() -> float:
    """Peak resident memory of this process, mapped pages included, since the peak was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def test_peak_memory_is_far_below_the_file(tmp_path, monkeypatch):
    """192 MB of tensors of 8 MB each; the process's memory, mapped pages included, grows by less than a quarter."""
    reset = Path("/proc/self/clear_refs")
    if not os.access(reset, os.W_OK):
        pytest.skip("the peak of the resident memory cannot be reset here")
    tensors = {f"t{index}": torch.ones(2048, 2048, dtype=torch.bfloat16) for index in range(24)}
    save_file(tensors, tmp_path / "model.safetensors")
    parameters = dict.fromkeys(tensors, torch.full((2048, 2048), 2.0))
    tensors.clear()
    monkeypatch.setattr(folder, "_REMAP_BYTES", 1 << 24)
    gc.collect()
    reset.write_text("5")
    before = _peak_mib()
    assert load_weights(tmp_path, parameters, tied={}, show_progress=False) == 192 * 2**20
    assert _peak_mib() - before < 48
    assert bool((parameters["t0"] == 1).all())
