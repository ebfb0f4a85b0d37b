"""A tokenizer with more ids than the model has rows: the vocabulary grows, and nothing else changes."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.errors import ConfigError
from trainer.preflight import preflight, prepare
from trainer.tokenizer import num_ids
from trainer.weights import load
from trainer.weights.load import load_weights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _mean(rows: Tensor) -> Tensor:
    """In float64, row after row, rounded once."""
    return torch.tensor(np.add.reduce(rows.double().numpy(), axis=0) / len(rows)).float()


def _masters(trainer: Any) -> dict[str, Tensor]:
    trainer.close()
    return trainer.grad_sync.masters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_the_mean_and_all_else_is_the_files(
    tied, dtype, tmp_path, save_model, tiny_tokenizer, run_config, make_trainer, caplog
):
    caplog.set_level(logging.INFO)
    save_model(vocab_size=299, tie_word_embeddings=tied, dtype=dtype)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    config = run_config(tokenizer={"name": str(tiny_tokenizer)})
    masters = _masters(make_trainer(config))
    grown = [EMBEDDING] if tied else [EMBEDDING, HEAD]
    assert {name: len(master) for name, master in masters.items() if len(master) == 384} == dict.fromkeys(grown, 384)
    for name in grown:
        assert torch.equal(masters[name][:299], stored[name].float())
        assert torch.equal(masters[name][299:], _mean(stored[name]).expand(85, -1))
        assert f"weights: rows 299 to 383 of {name} are new, each the mean of the 299 before" in caplog.messages
    others = [name for name in masters if name not in grown]
    assert len(others) == 19
    assert all(torch.equal(masters[name], stored[name].float()) for name in others)
    assert (
        f"vocabulary: the tokenizer of {tiny_tokenizer} has 300 ids and {tmp_path / 'hf'} has 299 rows: embedding and "
        "head have 384, a multiple of model.vocab_multiple = 128"
    ) in caplog.messages


@pytest.mark.parametrize(
    ("model_type", "options", "grown"),
    [
        ("gpt_neox", {"attention_dropout": 0.0}, ["gpt_neox.embed_in.weight", "embed_out.weight"]),
        (
            "gpt2",
            {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": 64},
            ["transformer.wte.weight"],
        ),
    ],
)
def test_models_of_transformers_grow_too(
    model_type, options, grown, tmp_path, save_model, tiny_tokenizer, run_config, make_trainer
):
    tied = len(grown) == 1
    save_model(model_type, vocab_size=299, tie_word_embeddings=tied, **options)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    trainer = make_trainer(run_config(tokenizer={"name": str(tiny_tokenizer)}))
    batch = trainer.loader.step(0).micro_batches[0]
    with torch.no_grad():
        assert trainer.model.logits(batch).shape[-1] == 384
    masters = _masters(trainer)
    assert masters.keys() == stored.keys()
    assert [name for name, master in masters.items() if master.shape != stored[name].shape] == grown
    for name, master in masters.items():
        assert torch.equal(master[: len(stored[name])], stored[name])
    for name in grown:
        assert torch.equal(masters[name][299:], _mean(stored[name]).expand(85, -1))


def test_only_a_tokenizer_with_more_ids_changes_the_size(save_model, tiny_tokenizer, run_config):
    """Field case R47: no id without a row, and no row is added for nothing."""
    tokenizer = {"name": str(tiny_tokenizer)}

    def rows(vocab_size: int, **model: Any) -> int:
        save_model(vocab_size=vocab_size)
        return prepare(run_config(tokenizer=tokenizer, model=model)).model_config.vocab_size

    assert rows(300) == 300
    assert rows(301) == 301
    assert rows(299, vocab_multiple=1) == 300
    assert rows(10, vocab_multiple=64) == 320
    assert rows(299, init={"seed": 1}) == 384, "drawn weights have room too"


def test_special_ids_beyond_the_length_have_rows(tmp_path, save_model, tiny_tokenizer, run_config):
    """Ids may have gaps: what counts is the largest one."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer.json"
    values = json.loads(path.read_text())
    assert [token["id"] for token in values["added_tokens"]] == [0, 1, 300, 301]
    assert num_ids(tokenizer) == 302
    save_model(vocab_size=301)
    config = run_config(tokenizer={"name": str(tmp_path / "tokenizer")}, model={"vocab_multiple": 1})
    assert prepare(config).model_config.vocab_size == 302

    class Gaps:
        def __len__(self) -> int:
            return 2

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "<|end|>": 7}

    assert num_ids(Gaps()) == 8  # type: ignore[arg-type]


@pytest.fixture(params=[(2, 0), (2, 1), (3, 1), (3, 2)], ids=lambda rank: f"rank{rank[1]}of{rank[0]}")
def shard(request: pytest.FixtureRequest) -> Iterator[Any]:
    """shard(shape): this rank's part of a parameter sharded over its rows."""
    world_size, rank = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))

    def make(rows: int, *others: int) -> DTensor:
        per_rank = -(-rows // world_size)
        count = max(min(per_rank, rows - rank * per_rank), 0)
        shape = torch.Size((rows, *others))
        local = torch.full((count, *others), torch.nan)
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=strides)

    yield make
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_comes_to_the_bits_of_one(tmp_path, monkeypatch, shard, dtype):
    """New rows on one rank, on several, and beside old ones; the mean is streamed in parts."""
    monkeypatch.setattr(load, "_MEAN_BYTES", 300)
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(37, 5, generator=generator).to(dtype)
    bias = torch.randn(37, generator=generator).to(dtype)
    save_file(
        {"embed": embedding, "head": embedding.clone(), "bias": bias, "w": torch.ones(7, 5)},
        tmp_path / "model.safetensors",
    )

    def filled(parameters: dict[str, Any]) -> dict[str, Any]:
        names = ("embed", "bias")
        load_weights(tmp_path, parameters, tied={"head": "embed"}, show_progress=False, vocabulary=names)
        return parameters

    whole = filled({"embed": torch.empty(64, 5), "bias": torch.empty(64), "w": torch.empty(7, 5)})
    assert torch.equal(whole["embed"], torch.cat([embedding.float(), _mean(embedding).expand(27, -1)]))
    assert torch.equal(whole["bias"][:37], bias.float())
    assert whole["bias"][37:].tolist() == [pytest.approx(bias.double().mean().item(), rel=1e-6)] * 27
    mine = filled({"embed": shard(64, 5), "bias": shard(64), "w": shard(7, 5)})
    for name, parameter in mine.items():
        start = parameter.device_mesh.get_local_rank() * -(-len(parameter) // parameter.device_mesh.size())
        local = parameter.to_local()
        assert torch.equal(local, whole[name][start : start + len(local)]), name


def test_only_the_vocabulary_may_grow_and_none_may_shrink(tmp_path, save_model, tiny_tokenizer, run_config):
    save_model(vocab_size=299)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    config = run_config(tokenizer={"name": str(tiny_tokenizer)})
    run = {"run_dir": tmp_path / "run", "world_size": 1, "say": print}
    preflight(config, **run)
    for name, rows, wanted in (
        (EMBEDDING, 298, "(299, 16)"),
        (EMBEDDING, 300, "(299, 16)"),
        ("model.norm.weight", 15, "(16,)"),
    ):
        save_file(tensors | {name: torch.ones(rows, *tensors[name].shape[1:])}, path, {"format": "pt"})
        with pytest.raises(ConfigError) as caught:
            preflight(config, **run)
        shape = (rows, *tensors[name].shape[1:])
        messages = [fault.message for fault in caught.value.faults]
        assert messages == [f"{path}: {name} is of shape {shape}, and the model's is {wanted}"]


@pytest.mark.parametrize("tied", [True, False])
def test_a_grown_run_resumes_and_its_export_has_the_same_logits(
    tied, tmp_path, save_model, tiny_tokenizer, run_config, make_trainer, run_losses
):
    save_model(vocab_size=299, tie_word_embeddings=tied, dtype=torch.bfloat16)
    tables = {"tokenizer": {"name": str(tiny_tokenizer)}, "ckpt": {"interval": 2, "weights": True}}
    whole = run_losses(run_config(**tables))
    exported = tmp_path / "runs" / "one" / "weights" / "step_3"
    assert json.loads((exported / "config.json").read_text())["vocab_size"] == 384

    (tmp_path / "hf" / "model.safetensors").unlink()
    fork = {"dir": str(tmp_path / "runs" / "one"), "step": 2}
    trainer = make_trainer(run_config(run_name="two", resume=fork, **tables))
    batch = trainer.loader.step(2).micro_batches[0]
    trainer.run()
    with torch.no_grad():
        own = trainer.model.logits(batch)
    trainer.close()
    lines = (tmp_path / "runs" / "two" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss/mean"] for line in lines][-1] == whole[-1]

    twin: Any = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert twin.get_input_embeddings().weight.shape[0] == 384
    with torch.no_grad():
        theirs = twin(input_ids=batch.input_ids).logits
    torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5)
    assert (twin.lm_head.weight is twin.model.embed_tokens.weight) == tied
    # An export is a model to start from, and has room for its tokenizer already.
    again = run_config(run_name="three", model={"name": str(exported)})
    assert prepare(again).model_config.vocab_size == 384
    assert Path(exported, "tokenizer.json").exists()
