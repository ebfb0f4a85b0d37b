"""Models that transformers alone implements: from their folders to runs, checkpoints and folders again."""

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from configs.errors import ConfigError
from models.batch import IGNORE_INDEX
from trainer.export.command import run_export
from trainer.preflight import preflight

NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
FAMILIES = {
    "gemma": {"tie_word_embeddings": True, "head_dim": 4},
    "phi3": {},
    "olmo2": {},
    "cohere": {"tie_word_embeddings": True, "logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 6.0},
    "gpt2": {"tie_word_embeddings": True, **NO_DROPOUT},
    "gpt_neox": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
}
CHECKPOINTS = {"type": "fake", "input_ids": "random", "length": "variable"}


def _run(trainer) -> dict[str, Tensor]:
    try:
        trainer.run()
    finally:
        trainer.close()
    return trainer.grad_sync.masters


@pytest.mark.parametrize("family", FAMILIES)
def test_from_a_folder_to_a_folder(family, tmp_path, save_model, run_config, make_trainer):
    """The names of the files all the way; bit for bit; what is exported has the run's logits in transformers."""
    twin = save_model(family, **FAMILIES[family])
    expected = dict(twin.named_parameters())
    if family == "gpt_neox":  # transformers 5 renames its head when it loads and saves
        expected["embed_out.weight"] = expected.pop("lm_head.weight")
    config = run_config(data=CHECKPOINTS, ckpt={"interval": 2})
    assert preflight(config, run_dir=tmp_path / "runs" / "one", world_size=1, say=print).steps == 3
    trainer = make_trainer(config)
    assert trainer.model.impl == "hf"
    masters = trainer.grad_sync.masters
    assert masters.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(masters[name], expected[name])] == []
    batch = trainer.loader.step(0).micro_batches[0]
    lengths = batch.segments.host_cu_seqlens.diff().tolist()
    trained = _run(trainer)

    run_dir, out = tmp_path / "runs" / "one", tmp_path / "out"
    assert run_export([str(run_dir), "--output-dir", str(out), "--dtype", "float32"]) == 0
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == load_file(tmp_path / "hf" / "model.safetensors").keys()
    assert [name for name in stored if not torch.equal(stored[name], trained[name])] == []
    exported = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    with torch.no_grad():
        ours = trainer.model.logits(batch)
        theirs = [exported(input_ids=part[None]).logits[0] for part in batch.input_ids[0].split(lengths)]
    assert (ours[0] - torch.cat(theirs)).abs().max() < 1e-5 * ours.abs().max()
    # And the export starts a run again.
    again = make_trainer(run_config(model={"name": str(out)}, run_name="again"))
    again.close()
    assert [name for name in trained if not torch.equal(again.grad_sync.masters[name], trained[name])] == []


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, save_model, run_config, make_trainer):
    save_model("olmo2")
    options = {"data": CHECKPOINTS, "ckpt": {"interval": 2}, "max_steps": 4, "scheduler": {"type": "constant"}}
    whole = _run(make_trainer(run_config(**options)))
    _run(make_trainer(run_config(run_name="two", **(options | {"max_steps": 2}))))
    resumed = _run(make_trainer(run_config(run_name="two", resume={}, **options)))
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def test_the_implementations_are_one_run(save_model, run_config, make_trainer, run_losses):
    """Of a family that both have: the same losses, and a checkpoint of one goes on with the other."""
    save_model("llama")
    data = {"data": CHECKPOINTS, "ckpt": {"interval": 2}}
    losses = {
        impl: run_losses(run_config(model={"impl": impl}, run_name=impl, **data)) for impl in ("custom", "hf", "auto")
    }
    assert losses["auto"] == losses["custom"]
    assert losses["hf"] == pytest.approx(losses["custom"], rel=1e-6) and len(losses["hf"]) == 3
    trainer = make_trainer(run_config(model={"impl": "custom"}, run_name="hf", resume={"step": 2}, **data))
    _run(trainer)
    assert trainer.model.impl == "custom" and trainer.state.progress.step == 3


def test_bf16_compute_beside_fp32_masters(save_model, run_config, make_trainer):
    """Field cases R84, R86, R92: masters in fp32, copies in bf16, RoPE's frequencies in fp32 with their values."""
    twin = save_model("olmo2")
    trainer = make_trainer(run_config(model={"compute_dtype": "bfloat16"}))
    trainer.close()
    assert {master.dtype for master in trainer.grad_sync.masters.values()} == {torch.float32}
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}
    buffers, theirs = dict(trainer.model.named_buffers()), dict(twin.named_buffers())
    assert buffers.keys() == theirs.keys() and buffers
    for name, buffer in buffers.items():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, theirs[name]), name
    output = trainer.model(trainer.loader.step(0).micro_batches[0])
    assert output.nats.dtype == torch.float32 and output.loss.isfinite()


@pytest.mark.parametrize(
    ("model", "arch", "message"),
    [
        ({"impl": "custom"}, {}, "model_type: olmo2 is none of the families implemented here"),
        ({}, {"attention_dropout": 0.1}, "attention_dropout: dropout is not implemented: set it to 0 (it is 0.1)"),
    ],
)
def test_what_cannot_be_trained_is_a_fault_of_the_name(model, arch, message, tmp_path, save_model, run_config):
    save_model("olmo2", **arch)
    with pytest.raises(ConfigError) as caught:
        preflight(run_config(model=model), run_dir=tmp_path / "runs" / "one", world_size=1, say=print)
    (fault,) = caught.value.faults
    assert fault.key == "model.name" and fault.message.startswith(message)


def test_positions_of_a_learned_table_are_those_of_documents(save_model, run_config, make_trainer):
    """gpt2 reads its table at the positions within the document, in rows longer than any document."""
    save_model("gpt2", **FAMILIES["gpt2"])
    trainer = make_trainer(run_config(data=CHECKPOINTS))
    batch = trainer.loader.step(0).micro_batches[0]
    trainer.close()
    lengths = batch.segments.host_cu_seqlens.diff().tolist()
    assert len(lengths) > 1
    trainer.model(batch).loss.backward()
    gradient = trainer.model.get_parameter("transformer.wpe.weight")
    gradients = trainer.grad_sync.gradients()["transformer.wpe.weight"]
    assert gradient.shape == gradients.shape
    counted = [int((part != IGNORE_INDEX).any()) and len(part) for part in batch.labels[0].split(lengths)]
    assert (gradients.abs().sum(1) > 0).sum() == max(counted)


def test_the_log_says_whose_network_it_is(save_model, run_config, make_trainer, caplog):
    save_model("olmo2")
    with caplog.at_level("INFO"):
        make_trainer(run_config(run_name="log")).close()
    assert 'model: olmo2, transformers\' own, with attention inside documents (model.impl = "auto")' in caplog.text


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_adapters_in_a_model_of_transformers(compute, tmp_path, save_model, run_config, make_trainer):
    """[model.lora]: the base stays as it is, adapters move, and the merged export is what was trained."""
    twin = save_model("phi3")
    lora = {"rank": 2, "target_modules": ["qkv_proj", "down_proj"]}
    model = {"lora": lora, "compute_dtype": compute, "ac": {"mode": "full"}}
    config = run_config(model=model, data=CHECKPOINTS, ckpt={}, scheduler={"type": "constant"}, optim={"lr": 1e-2})
    preflight(config, run_dir=tmp_path / "runs" / "one", world_size=1, say=print)
    trainer = make_trainer(config)
    batch = trainer.loader.step(0).micro_batches[0]
    trained = _run(trainer)
    assert len(trained) == 8 and all("lora_" in name for name in trained)
    frozen = dict(twin.named_parameters())
    assert trainer.grad_sync.frozen.keys() == frozen.keys()
    for name, weight in trainer.grad_sync.frozen.items():
        assert torch.equal(weight, frozen[name].detach().to(weight.dtype)), name
    if compute == "float32":
        out = tmp_path / "out"
        run_dir = str(tmp_path / "runs" / "one")
        assert run_export([run_dir, "--output-dir", str(out), "--dtype", "float32", "--merge"]) == 0
        merged = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
        lengths = batch.segments.host_cu_seqlens.diff().tolist()
        with torch.no_grad():
            theirs = [merged(input_ids=part[None]).logits[0] for part in batch.input_ids[0].split(lengths)]
            ours = trainer.model.logits(batch)[0]
        assert (ours - torch.cat(theirs)).abs().max() < 1e-5 * ours.abs().max()
