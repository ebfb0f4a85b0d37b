"""Adapters on a GPU: no host sync with dropout, compiled and recomputed alike, repeats bit for bit, lean memory."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from configs.model import ModelConfig
from configs.sft import SFTConfig
from models.hf_config import read_config
from trainer.hooks import HookContext
from trainer.model_setup import build_parallel_model
from trainer.parallel.mesh import one_rank_mesh
from trainer.run import Run, StopSignal
from trainer.train import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytest.importorskip("peft", reason="needs peft")

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch):
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    torch._dynamo.reset()
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.compiler.set_stance("default")


class Watch:
    """A hook: from the end of step 3 to that of step 10 nothing may wait for the device, nor compile anything."""

    def before_optimizer_step(self, context: HookContext) -> None:
        pass

    def after_optimizer_step(self, context: HookContext) -> None:
        if context.step in (3, 10):
            torch.cuda.set_sync_debug_mode("error" if context.step == 3 else "default")
            torch.compiler.set_stance("fail_on_recompile" if context.step == 3 else "default")

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def train(base: Path, folder: Path, *hooks: Any, model: dict[str, Any] | None = None, **tables: Any) -> list[dict]:
    lora = {"rank": 8, "dropout": 0.1}
    data = {"type": "fake", "seq_len": 512, "batch_size": 8, "micro_batch_size": 4, "input_ids": "random"}
    values = {"model": {"name": str(base), "lora": lora} | (model or {}), "data": data | {"length": "variable"}}
    values |= {"max_steps": 12, "output_dir": str(folder), "run": {"name": "run"}, "optim": {"lr": 1e-3}}
    config = SFTConfig.model_validate(values | {"log": {"checksum_interval": 1}} | tables)
    folder.mkdir()
    trainer = Trainer(config, Run(dir=folder, attempt=0, stop=StopSignal()))
    trainer.hooks.extend(hooks)
    try:
        trainer.run()
    finally:
        trainer.close()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["step"]]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("ac", [None, "selective", "full"])
def test_dropout_never_waits_and_compiles_once(base: Path, tmp_path: Path, compiled: bool, ac: str | None) -> None:
    model = {"compile": {"fullgraph": True} if compiled else None, "ac": {"mode": ac} if ac else None}
    records = train(base, tmp_path / "run", Watch(), model=model)
    assert len(records) == 12
    assert len({record["digest/params"] for record in records}) == 12


def test_compiled_and_recomputed_runs_draw_the_same_masks(base: Path, tmp_path: Path) -> None:
    plain = train(base, tmp_path / "plain", max_steps=4)
    other = {"compile": {}, "ac": {"mode": "full"}}
    compiled = train(base, tmp_path / "compiled", max_steps=4, model=other)
    assert [record["loss/mean"] for record in compiled] == pytest.approx(
        [record["loss/mean"] for record in plain], rel=2e-4
    )
    norms = [[record["optim/grad_norm"] for record in records] for records in (compiled, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)


def test_deterministic_runs_repeat_bit_for_bit(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        digests = [
            [record["digest/params"] for record in train(base, tmp_path / name, max_steps=4, deterministic=True)]
            for name in ("first", "second")
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 4


def test_frozen_weights_take_two_bytes_each(base: Path) -> None:
    config = ModelConfig.model_validate({"name": str(base), "lora": {"rank": 8}})
    gc.collect()  # trainers of earlier tests, which hold themselves in cycles, would be freed meanwhile
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    mesh = one_rank_mesh(torch.device("cuda", 0))
    model, grad_sync = build_parallel_model(config, read_config(base), seq_len=512, mesh=mesh)
    allocated = torch.cuda.memory_allocated() - before
    counts = model.count_parameters()
    frozen = counts.num_params - counts.num_trainable_params
    assert sum(tensor.numel() for tensor in grad_sync.frozen.values()) == frozen
    wanted = 2 * frozen + 6 * counts.num_trainable_params  # bf16; fp32 masters with bf16 copies
    assert wanted <= allocated <= 1.02 * wanted + 512 * len(list(model.parameters()))
