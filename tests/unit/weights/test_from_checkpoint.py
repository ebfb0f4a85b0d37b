"""`model.name` may be a checkpoint of ours: the same weights to the last bit, no export between."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from configs.errors import ConfigError
from trainer.checkpoint.as_model import open_model
from trainer.checkpoint.manifest import read_checkpoint
from trainer.checkpoint.tensor_reader import TensorReader
from trainer.preflight import preflight, prepare
from trainer.weights.load import load_weights

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def checkpoint(tmp_path, save_model, run_config, run_losses) -> Path:
    """Step 3 of a run with a tied head and bf16 compute, so that an export would be rounded."""
    save_model(tie_word_embeddings=True)
    config = run_config(run_name="first", ckpt={}, model={"compute_dtype": "bfloat16"}, optim={"lr": 0.01})
    assert len(run_losses(config)) == 3
    return tmp_path / "runs" / "first" / "checkpoints" / "step_3"


def test_the_next_run_starts_from_the_masters_of_the_last(checkpoint, tmp_path, run_config, make_trainer):
    shutil.rmtree(tmp_path / "hf")
    config = run_config(run_name="next", model={"name": str(checkpoint)})
    assert prepare(config).model_config.vocab_size == 64
    preflight(config, run_dir=tmp_path / "runs" / "next", world_size=1, say=print)
    trainer = make_trainer(config)
    trainer.close()
    _, metadata = read_checkpoint(checkpoint)
    reader = TensorReader(checkpoint, metadata)
    assert len(trainer.grad_sync.masters) == 20
    for name, master in trainer.grad_sync.masters.items():
        stored = reader.read(f"model.{name}", torch.empty_like(master))
        assert torch.equal(master, stored), name
        assert not torch.equal(stored, stored.bfloat16().float()) or master.dim() == 1


def test_it_grows_for_a_tokenizer_with_more_ids(checkpoint, tiny_tokenizer, run_config, make_trainer):
    config = run_config(run_name="next", model={"name": str(checkpoint)}, tokenizer={"name": str(tiny_tokenizer)})
    trainer = make_trainer(config)
    trainer.close()
    embedding = trainer.grad_sync.masters[EMBEDDING]
    with open_model(checkpoint).open_rows() as read:
        stored = read(EMBEDDING, 0, 64)
    assert embedding.shape == (384, 16)
    assert torch.equal(embedding[:64], stored)
    assert torch.equal(embedding[64:], stored.double().mean(0).float().expand(320, -1))


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_of_a_tensor_in_several_parts(dim, tmp_path):
    """As two ranks write it, cut along its rows or along its columns."""
    whole = torch.arange(35.0).view(7, 5)
    parts = {"a": whole.narrow(dim, 0, 3).clone(), "b": whole.narrow(dim, 3, whole.shape[dim] - 3).clone()}
    dcp.save(parts | {"s": torch.tensor(2.5)}, checkpoint_id=tmp_path / "one", no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path / "one").read_metadata()
    chunks = []
    for name, start in (("a", 0), ("b", 3)):
        offsets = torch.Size((start, 0) if dim == 0 else (0, start))
        chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=parts[name].shape))
        metadata.storage_data[MetadataIndex("w", offsets)] = metadata.storage_data[MetadataIndex(name, (0, 0))]
    entry = metadata.state_dict_metadata["a"]
    metadata.state_dict_metadata["w"] = dataclasses.replace(entry, size=whole.shape, chunks=chunks)
    reader = TensorReader(tmp_path / "one", metadata)
    for start, stop in ((0, 7), (0, 3), (2, 3), (2, 5), (6, 7), (3, 3)):
        assert torch.equal(reader.read_rows("w", start, stop), whole[start:stop])
    assert reader.read_rows("s", 0, 1).item() == 2.5


def _fault(config: Any) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        preflight(config, run_dir=Path("nowhere"), world_size=1, say=print)
    (fault,) = caught.value.faults
    return fault.key, fault.message


def test_what_cannot_be_started_from_is_said(checkpoint, tmp_path, tiny_tokenizer, tiny_shards, run_config):
    run = checkpoint.parents[1]
    for folder in (run, checkpoint.parent):
        assert _fault(run_config(model={"name": str(folder)})) == (
            "model.name",
            f"{folder} holds 1 checkpoints: name one, such as {checkpoint}",
        )
    data = {"type": "tokens", "paths": [str(tiny_shards)]}
    assert _fault(run_config(model={"name": str(checkpoint)}, data=data)) == (
        "tokenizer.name",
        "is missing: a checkpoint holds no tokenizer; its run had none",
    )
    key, message = _fault(run_config(model={"name": str(checkpoint), "lora": {"rank": 2}}))
    assert key == "model.name" and message.startswith(f"{checkpoint} is a checkpoint, and adapters are used beside")

    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    state = json.loads((damaged / "state.json").read_text())
    state["state"]["model"]["config"]["vocab_size"] = 65
    (damaged / "state.json").write_text(json.dumps(state))
    assert _fault(run_config(model={"name": str(damaged)})) == (
        "model.name",
        f"checkpoint {damaged} cannot be loaded: state.json was changed since it was written",
    )


def test_a_cut_file_of_a_checkpoint_is_a_fault_at_start(checkpoint, run_config):
    (part,) = checkpoint.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-1])
    key, message = _fault(run_config(model={"name": str(checkpoint)}))
    assert key == "model.name" and f"{part.name} has " in message


def test_weights_can_be_read_for_parameters_in_any_dtype(checkpoint):
    files = open_model(checkpoint)
    shapes = {name: stored.shape for name, stored in files.tensors.items()}
    assert {stored.dtype for stored in files.tensors.values()} == {"F32"}
    parameters = {name: torch.empty(shape, dtype=torch.float64) for name, shape in shapes.items()}
    load_weights(checkpoint, parameters, tied={}, show_progress=False, open_files=open_model)
    with files.open_rows() as read:
        assert torch.equal(parameters[EMBEDDING].float(), read(EMBEDDING, 0, 64))
