"""What `export-hf` writes, read back by safetensors and transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from models.batch import IGNORE_INDEX
from models.hf_config import config_from_dict
from models.registry import build_model
from trainer.checkpoint import Checkpointer, read_state
from trainer.data.collate import collate
from trainer.data.row import Rows
from trainer.export.command import run_export
from trainer.parallel.mesh import one_rank_mesh

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@pytest.fixture(scope="module")
def untied(train_run: Callable[..., Path]) -> Path:
    return train_run("untied")


@pytest.fixture(scope="module")
def tied(train_run: Callable[..., Path]) -> Path:
    """Trained in fp32."""
    arch = {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 8}
    return train_run("tied", arch=arch, model={"compute_dtype": "float32"})


def masters(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The model's tensors by the loader that training uses."""
    config = config_from_dict(read_state(checkpoint)["model"]["config"])
    model = build_model(config, seq_len=8, attn="sdpa", dtype=torch.float32)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    mesh = one_rank_mesh(torch.device("cpu"))
    Checkpointer(checkpoint.parents[1], None, mesh).load(checkpoint, tensors, ignore=("optimizer.",))
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def our_logits(checkpoint: Path, ids: list[int]) -> torch.Tensor:
    config = config_from_dict(read_state(checkpoint)["model"]["config"])
    model = build_model(config, seq_len=8, attn="sdpa", dtype=torch.float32)
    model.load_state_dict(masters(checkpoint))
    rows = Rows.empty(1, len(ids))
    rows.input_ids[0] = ids
    rows.labels.fill(IGNORE_INDEX)
    rows.segment_lengths[0] = np.array([len(ids)], np.int64)
    with torch.no_grad():
        return model.logits(collate(rows, full_rows=True, pin_memory=False))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        assert not set(part) & set(tensors)
        tensors |= part
    return tensors


@pytest.mark.parametrize("form", ["tied", "untied"])
def test_fp32_round_trip(request: pytest.FixtureRequest, tmp_path: Path, form: str) -> None:
    """Bit for bit the master weights; transformers loads them without a complaint and gives our model's logits."""
    run_dir: Path = request.getfixturevalue(form)
    out = tmp_path / "hf"
    assert run_export([str(run_dir), "--output-dir", str(out), "--dtype", "float32"]) == 0

    checkpoint = run_dir / "checkpoints" / "step_4"
    expected, found = masters(checkpoint), stored(out)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    loaded = dict(model.named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    ids = [5, 17, 250, 3, 99, 0, 42]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits
    torch.testing.assert_close(logits, our_logits(checkpoint, ids), rtol=1e-5, atol=1e-5)


def test_the_files_of_a_folder(untied: Path, tmp_path: Path, tiny_tokenizer: Path) -> None:
    """Config, generation config and tokenizer say what a user of the folder needs, and no name of a wrapper or path."""
    out = tmp_path / "hf"
    assert run_export([str(untied), "--output-dir", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "oneloop.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((out / "config.json").read_text())
    expected = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "vocab_size": 384}
    expected |= {"tie_word_embeddings": False, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
    assert {key: config[key] for key in expected} == expected
    assert "id2label" not in config
    generation = GenerationConfig.from_pretrained(out)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (0, 0, 1)
    text = "ba ko rituselmon"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(tiny_tokenizer).encode(text)
    assert json.loads((out / "oneloop.json").read_text()) == {"step": 4, "run": "untied", "dtype": "bfloat16"}
    for name in ("config.json", "generation_config.json", "oneloop.json", "tokenizer_config.json"):
        assert str(tmp_path.parent) not in (out / name).read_text()
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        names = list(file.keys())
    assert not [name for name in names if "_orig_mod" in name or "_fsdp" in name or "_checkpoint" in name]


def test_sharded_and_tied(tied: Path, tmp_path: Path) -> None:
    """Field case R69: every shard opens, the index lists exactly what the files hold, the head is not listed."""
    out = tmp_path / "hf"
    size = 40_000
    arguments = ["--output-dir", str(out), "--dtype", "float32", "--max-shard-size", "40KB"]
    assert run_export([str(tied), *arguments]) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert shards == [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    assert len(shards) > 2
    held = {name: path.name for path in out.glob("*.safetensors") for name in load_file(path)}
    assert index["weight_map"] == held
    assert "lm_head.weight" not in held
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored(out).values())
    assert all(sum(tensor.nbytes for tensor in load_file(out / name).values()) <= size for name in shards)
    # Layer 10 comes after layer 9.
    order = list(dict.fromkeys(held[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in range(11)))
    assert order == sorted(order)

    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    ids = [1, 2, 3, 299]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits
    checkpoint = tied / "checkpoints" / "step_4"
    torch.testing.assert_close(logits, our_logits(checkpoint, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["tied", "untied"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_asked_for(request: pytest.FixtureRequest, tmp_path: Path, form: str, dtype: str) -> None:
    """Field case R71: a run computed in fp32 or bf16 exports in each dtype: tensors, config and rounding agree."""
    run_dir: Path = request.getfixturevalue(form)
    out = tmp_path / "hf"
    assert run_export([str(run_dir), "--output-dir", str(out), "--dtype", dtype]) == 0
    found = stored(out)
    for name, master in masters(run_dir / "checkpoints" / "step_4").items():
        assert found[name].dtype == DTYPES[dtype]
        assert torch.equal(found[name], master.to(DTYPES[dtype]))
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == DTYPES[dtype]


@pytest.mark.parametrize(("form", "dtype"), [("tied", "float32"), ("untied", "bfloat16")])
def test_dtype_by_default(request: pytest.FixtureRequest, form: str, dtype: str) -> None:
    """That of the forward pass; and the default folder."""
    run_dir: Path = request.getfixturevalue(form)
    assert run_export([str(run_dir), "--step", "2"]) == 0
    out = run_dir / "exports" / "step_2"
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert {tensor.dtype for tensor in stored(out).values()} == {DTYPES[dtype]}


def test_weights_of_every_checkpoint_of_a_run(train_run: Callable[..., Path]) -> None:
    """`ckpt.weights` in the loop: what `export-hf` gives, and made up by a resumed run that was killed before."""
    run_dir = train_run("weights", arch={"num_hidden_layers": 1}, ckpt={"interval": 2, "weights": True})
    assert sorted(path.name for path in (run_dir / "weights").iterdir()) == ["step_2", "step_4"]
    for step in (2, 4):
        assert run_export([str(run_dir), "--step", str(step)]) == 0
        one, other = (stored(run_dir / kind / f"step_{step}") for kind in ("weights", "exports"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    written = (run_dir / "weights" / "step_4" / "model.safetensors").read_bytes()
    shutil.rmtree(run_dir / "weights" / "step_4")
    again = {"interval": 2, "weights": True}
    assert train_run("weights", arch={"num_hidden_layers": 1}, ckpt=again, resume={}) == run_dir
    assert (run_dir / "weights" / "step_4" / "model.safetensors").read_bytes() == written
