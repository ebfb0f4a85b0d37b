"""The levers that lower a GPU's memory: the same numbers, less memory, no host sync; and the estimate of it."""

import gc
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from configs.model import ModelConfig
from configs.optim import AdamWConfig
from configs.sft import SFTConfig
from models.registry import build_config
from trainer.data.collate import collate
from trainer.data.row import Rows
from trainer.hooks import HookContext
from trainer.memory import RankShape, estimate_memory
from trainer.micro_batch import run_micro_batches
from trainer.model_setup import build_parallel_model, set_first_weights
from trainer.optim.build import build_optimizer
from trainer.optim.gradients import clip_gradients, gradient_norms
from trainer.parallel.checksum import parameter_checksum
from trainer.parallel.mesh import Mesh
from trainer.preflight.checks import check_model
from trainer.preflight.inputs import prepare
from trainer.run import Run, StopSignal
from trainer.train import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Read when the first product runs; deterministic products are refused without it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

ARCH = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
SEQ_LEN, ROWS = 1024, 8


class SyncWatch:
    """A hook: from the end of step 3 on nothing may wait for the device but the labelled wait."""

    def before_optimizer_step(self, context: HookContext) -> None:
        pass

    def after_optimizer_step(self, context: HookContext) -> None:
        if context.step == 3:
            torch.cuda.set_sync_debug_mode("error")
        if context.step == 6:
            torch.cuda.set_sync_debug_mode("default")

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


@pytest.fixture
def one_rank(monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    torch._dynamo.reset()
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.use_deterministic_algorithms(False)


def make_config(output_dir: Path, *, deterministic: bool = True, length: str = "fixed", **model: Any) -> SFTConfig:
    return SFTConfig.model_validate(
        {
            "model": {"arch": ARCH, "init": {}} | model,
            "data": {
                "type": "fake",
                "seq_len": SEQ_LEN,
                "batch_size": 2 * ROWS,
                "micro_batch_size": ROWS,
                "length": length,
                "input_ids": "random",
            },
            "max_steps": 8,
            "log": {"checksum_interval": 4},
            "deterministic": deterministic,
            "output_dir": str(output_dir),
            "run": {"name": "run"},
        }
    )


def train(config: SFTConfig) -> tuple[list[dict], float]:
    """Records of the steps, and the peak in GiB beyond what earlier tests left."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_dir = config.output_dir / "run"
    run_dir.mkdir(parents=True)
    trainer = Trainer(config, Run(dir=run_dir, attempt=0, stop=StopSignal()))
    trainer.hooks.append(SyncWatch())
    try:
        trainer.run()
    finally:
        trainer.close()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["step"]], peak


def numbers(records: list[dict]) -> list[tuple]:
    return [(record["loss/mean"], record["optim/grad_norm"], record.get("digest/params")) for record in records]


LEVERS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    # without, with, and GiB that it saves at least: of the forward pass's activations all but those of three blocks
    "activations": ({}, {"ac_offloading": {}}, 1.0),
    "activations, one in flight": ({}, {"ac_offloading": {"max_inflight_activations": 1}}, 1.2),
    "block inputs": ({"ac": {}}, {"ac": {}, "ac_offloading": {"max_inflight_activations": 1}}, 0.04),
    "activations, compiled": ({"compile": {}}, {"compile": {}, "ac_offloading": {}}, 0.6),
    "block inputs, compiled": (
        {"compile": {"fullgraph": True}, "ac": {}},
        {"compile": {"fullgraph": True}, "ac": {}, "ac_offloading": {"max_inflight_activations": 1}},
        0.04,
    ),
    "moments": ({"ac": {}}, {"ac": {}, "optim_cpu_offload": True}, 0.4),
}


@pytest.mark.parametrize("lever", LEVERS)
def test_same_numbers_in_less_memory(one_rank, tmp_path, lever):
    """Loss, gradient norm and all weights are equal bit for bit over eight steps of two micro-batches; and from the
    fourth step on the host never waits."""
    without, with_lever, saves = LEVERS[lever]
    expected, most = train(make_config(tmp_path / "without", **without))
    found, least = train(make_config(tmp_path / "with", **with_lever))
    assert numbers(found) == numbers(expected)
    assert sum("digest/params" in record for record in found) == 2
    assert most - least > saves, (most, least)


def test_packed_documents_are_offloaded_too(one_rank, tmp_path):
    """Varlen attention, not deterministic: losses as near as two runs without the lever are."""
    expected, _ = train(make_config(tmp_path / "without", deterministic=False, length="variable", compile={}))
    found, _ = train(
        make_config(tmp_path / "with", deterministic=False, length="variable", compile={}, ac_offloading={})
    )
    for a, b in zip(expected, found, strict=True):
        assert b["loss/mean"] == pytest.approx(a["loss/mean"], rel=1e-3)


def test_masters_in_bfloat16(one_rank, tmp_path):
    """Half of the memory of weights and moments, and it learns: losses within 1 % of those of fp32 masters."""
    expected, most = train(make_config(tmp_path / "without", ac={}))
    found, least = train(make_config(tmp_path / "with", ac={}, optimization_dtype="bfloat16"))
    for a, b in zip(expected, found, strict=True):
        assert b["loss/mean"] == pytest.approx(a["loss/mean"], rel=1e-2)
    assert most - least > 0.5, (most, least)


def test_gradients_and_logits_do_not_outlive_their_use(one_rank, tmp_path):
    """With one micro-batch per step, no sums of gradients lie beside the activations of the next step."""
    config = make_config(tmp_path / "one")
    config = SFTConfig.model_validate(
        config.model_dump() | {"data": config.data.model_dump() | {"batch_size": ROWS}, "clean": False}
    )
    records, _ = train(config)
    peaks = [record["perf/peak_memory"] for record in records]
    assert peaks[-1] == pytest.approx(peaks[1], rel=1e-3)
    gradients = 4 * records_params(config) / 2**30
    two, _ = train(make_config(tmp_path / "two"))
    assert two[-1]["perf/peak_memory"] - peaks[-1] > 0.7 * gradients


def records_params(config: SFTConfig) -> int:
    model = check_model(config, prepare(config))
    return model.count_parameters().num_params


@pytest.mark.parametrize(
    "model",
    [{}, {"ac": {}}, {"compile": {}}, {"compile": {}, "ac": {"mode": "selective"}}, {"compile": {}, "ac": {}}],
    ids=["eager", "eager full", "compiled", "compiled selective", "compiled full"],
)
def test_estimate_is_near_the_peak(one_rank, tmp_path, model):
    """Within 15 % on a model small enough that workspaces count; benchmarks/memory_estimate.py has 10 % on real
    ones."""
    config = make_config(tmp_path, deterministic=False, **model)
    shape = RankShape(rows=ROWS, seq_len=SEQ_LEN, grad_accum_steps=2)
    estimate = estimate_memory(config.model, check_model(config, prepare(config)), shape)
    _, peak = train(config)
    assert estimate.total / 2**30 == pytest.approx(peak, rel=0.15), estimate.lines()


@pytest.fixture
def sharded_mesh(tmp_path):
    """FSDP's form at one rank: what it moves to the host does not depend on how many there are."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield Mesh(
        device=device,
        rank=0,
        world_size=1,
        dp_rank=0,
        dp_size=1,
        device_mesh=init_device_mesh("cuda", (1,), mesh_dim_names=("dp_shard_cp",)),
        host_group=None,
    )
    dist.destroy_process_group()


def test_fsdp_on_the_host(sharded_mesh):
    """Weights, gradients and moments in host memory: gradient norms equal bit for bit on the first step, the same
    updates but for the rounding of the host's arithmetic."""
    results = {}
    for offload in (False, True):
        config = ModelConfig.model_validate({"arch": ARCH, "init": {}, "ac": {}, "fsdp_cpu_offload": offload})
        hf_config = build_config(ARCH, tokenizer_length=None, special_ids={})
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model, grad_sync = build_parallel_model(config, hf_config, seq_len=SEQ_LEN, mesh=sharded_mesh)
        set_first_weights(config, model, grad_sync, sharded_mesh, folder=None)
        dims = {name: parameter.dim() for name, parameter in model.canonical_parameters().items()}
        optimizer = build_optimizer(AdamWConfig(), grad_sync.masters, dims)
        norms = [update(model, grad_sync, optimizer, sharded_mesh, step) for step in range(3)]
        peak = torch.cuda.max_memory_allocated() - before
        masters = {name: master.cpu().clone() for name, master in grad_sync.masters.items()}
        kinds = {master.device.type for master in grad_sync.masters.values()}
        checksum = parameter_checksum({name: grad_sync.as_global(name, m) for name, m in grad_sync.masters.items()})
        assert [lane.device.type for lane in checksum] == [next(iter(kinds))] * 2
        results[offload] = (norms, masters, peak, kinds)
        del model, grad_sync, optimizer
    (plain_norms, plain, most, on_device), (norms, found, least, on_host) = results[False], results[True]
    assert (on_device, on_host) == ({"cuda"}, {"cpu"})
    assert norms[0] == pytest.approx(plain_norms[0], rel=1e-5)
    assert norms[2] == pytest.approx(plain_norms[2], rel=1e-2)
    for name, master in plain.items():
        # Three updates of at most the rate each, whose signs may differ where a gradient is nothing but rounding.
        assert (found[name] - master).abs().max() <= 6.1 * 3e-4, name
        assert (found[name] - master).abs().mean() <= 3e-5, name
    masters_and_moments = 12 * sum(master.numel() for master in plain.values())
    assert most - least > 0.9 * masters_and_moments


def update(model, grad_sync, optimizer, mesh: Mesh, step: int) -> float:
    """One optimizer step of two micro-batches; gives the gradient's norm."""
    generator = torch.Generator().manual_seed(step)
    batches = []
    for _ in range(2):
        rows = Rows.empty(2, SEQ_LEN)
        ids = torch.randint(0, ARCH["vocab_size"], (2, SEQ_LEN + 1), generator=generator).numpy()
        rows.input_ids[:], rows.labels[:] = ids[:, :-1], ids[:, 1:]
        rows.segment_lengths = [torch.tensor([SEQ_LEN]).numpy()] * 2
        batches.append(collate(rows, full_rows=True, pin_memory=True))
    tokens = sum(batch.num_loss_tokens for batch in batches)
    result = run_micro_batches(model, batches, tokens, grad_sync, mesh, step=step)
    gradients = grad_sync.gradients()
    norms = gradient_norms(gradients, result.nats, result.loss_tokens, mesh)
    clip_gradients(gradients, norms.total, 1.0)
    optimizer.step(gradients, 3e-4, norms.update_ok)
    grad_sync.clear_gradients()
    grad_sync.publish()
    return norms.total.item()
