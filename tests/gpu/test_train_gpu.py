"""The training loop on a GPU: no host sync in a step, no recompilation, the same numbers as on the CPU, repeats."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from configs.sft import SFTConfig
from trainer.hooks import HookContext
from trainer.metrics import WAIT_LABEL
from trainer.run import Run, StopSignal
from trainer.train import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
COMMAND = [sys.executable, "-c", "import sys; from trainer.sft import main; sys.exit(main())"]

ARCH = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def make_config(output_dir: Path, **tables) -> SFTConfig:
    """A small packed run; `tables` replace or extend whole tables."""
    model = {"arch": ARCH, "init": {}} | tables.pop("model", {})
    data = {"type": "fake", "seq_len": 512, "batch_size": 8, "micro_batch_size": 4, "length": "variable"}
    data |= {"input_ids": "random"} | tables.pop("data", {})
    values = {"model": model, "data": data, "max_steps": 12, "output_dir": str(output_dir), "run": {"name": "run"}}
    return SFTConfig.model_validate(values | tables)


class At:
    """A hook that calls functions after given steps."""

    def __init__(self, **actions) -> None:
        self._actions = {int(name.removeprefix("step_")): action for name, action in actions.items()}

    def before_optimizer_step(self, context: HookContext) -> None:
        pass

    def after_optimizer_step(self, context: HookContext) -> None:
        if context.step in self._actions:
            self._actions[context.step]()

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
    torch.compiler.set_stance("default")


def run_trainer(config: SFTConfig, *hooks) -> list[dict]:
    run_dir = config.output_dir / str(config.run.name)
    run_dir.mkdir(parents=True)
    trainer = Trainer(config, Run(dir=run_dir, attempt=0, stop=StopSignal()))
    trainer.hooks.extend(hooks)
    try:
        trainer.run()
    finally:
        trainer.close()
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["step"]]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("length", ["fixed", "variable"])
@pytest.mark.parametrize("ac", [None, "selective", "full"])
def test_steps_without_host_sync(one_rank, tmp_path, compiled, length, ac):
    """From the end of step 3 to that of step 10 nothing waits for the device, the labelled wait apart; the parameters'
    checksum included."""
    model = {"compile": {"fullgraph": True} if compiled else None, "ac": {"mode": ac} if ac else None}
    config = make_config(tmp_path, model=model, data={"length": length}, log={"checksum_interval": 2})
    watch = At(
        step_3=lambda: torch.cuda.set_sync_debug_mode("error"),
        step_10=lambda: torch.cuda.set_sync_debug_mode("default"),
    )
    records = run_trainer(config, watch)
    assert len(records) == 12
    assert records[-1]["loss/mean"] < records[0]["loss/mean"]
    assert len({record["digest/params"] for record in records if "digest/params" in record}) == 6


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_trace_shows_no_synchronisation(one_rank, tmp_path, compiled):
    """SPEC 6: on the main thread no stream, device or event synchronisation but the labelled wait."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profiler = torch.profiler.profile(activities=activities)
    config = make_config(tmp_path, model={"compile": {} if compiled else None})
    # Starting and stopping the profiler synchronises: only whole steps between are looked at.
    run_trainer(config, At(step_4=profiler.start, step_8=profiler.stop))
    trace = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    waits = sorted((event for event in events if event["name"] == WAIT_LABEL), key=lambda event: event["ts"])
    assert len(waits) == 4
    main_thread = waits[0]["tid"]
    first, last = waits[0]["ts"], waits[-1]["ts"] + waits[-1]["dur"]

    def is_labelled(event) -> bool:
        return any(wait["ts"] <= event["ts"] <= wait["ts"] + wait["dur"] for wait in waits)

    syncs = [
        event["name"]
        for event in events
        if "Synchronize" in event["name"] and event["tid"] == main_thread and first <= event["ts"] <= last
        if not is_labelled(event)
    ]
    assert syncs == []
    assert any(event["name"] == "cudaLaunchKernel" and event["tid"] == main_thread for event in events)


def test_no_recompilation_over_30_packed_batches(one_rank, tmp_path):
    """Field case R10: documents of all counts and lengths after warm-up, no new graph, flat step time."""
    config = make_config(tmp_path, model={"compile": {"fullgraph": True}}, max_steps=34)
    records = run_trainer(config, At(step_2=lambda: torch.compiler.set_stance("fail_on_recompile")))
    assert len(records) == 34
    times = sorted(record["time/step"] for record in records[5:])
    assert times[-1] < 5 * times[len(times) // 2]


def test_deterministic_runs_repeat_bit_for_bit(tmp_path):
    columns = []
    for name in ("a", "b"):
        config = make_config(tmp_path / name, deterministic=True)
        records = run_command(config, tmp_path / f"{name}.json", os.environ)
        columns.append([(record["loss/mean"], record["optim/grad_norm"]) for record in records])
    assert columns[0] == columns[1]


def run_command(config: SFTConfig, path: Path, env) -> list[dict]:
    path.write_text(config.model_dump_json())
    done = subprocess.run([*COMMAND, "@", path], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (config.output_dir / "run" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["step"]]


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_gpu_and_cpu_agree(tmp_path, dtype, limit):
    """The same run by the same command on both devices: varlen kernels in bf16, SDPA in fp32."""
    results = {}
    for device, env in (("gpu", os.environ), ("cpu", os.environ | {"CUDA_VISIBLE_DEVICES": ""})):
        config = make_config(
            tmp_path / device,
            model={"compute_dtype": dtype if device == "gpu" else "float32"},
            max_steps=6,
            deployment={"type": "single_node", "num_train_gpus": 1},
        )
        results[device] = run_command(config, tmp_path / f"{device}.json", env)
    for gpu, cpu in zip(results["gpu"], results["cpu"], strict=True):
        assert gpu["digest/rows"] == cpu["digest/rows"]
        assert gpu["loss/mean"] == pytest.approx(cpu["loss/mean"], rel=limit)
        assert gpu["optim/grad_norm"] == pytest.approx(cpu["optim/grad_norm"], rel=10 * limit)


LAYOUTS = {
    2: [{}, {"defer_grad_sync": True}, {"dp_replicate": 2}, {"dp_replicate": 2, "defer_replicate_sync": True}],
    4: [{"dp_replicate": 2}, {"dp_replicate": 2, "defer_replicate_sync": True}, {"dp_replicate": 2, "cp": 2}],
}


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize(("dtype", "loss_limit", "norm_limit"), [("float32", 1e-5, 1e-4), ("bfloat16", 3e-3, 3e-2)])
def test_one_and_several_gpus_agree(gpus, dtype, loss_limit, norm_limit, tmp_path):
    """Shards, replicas of them and deferral over NCCL against the unwrapped form; two micro-batches or more per step,
    and checkpoints of them all.

    In bfloat16 each product's result is off by up to 2^-9, and gradients come in another order: a dozen steps later the
    losses may differ by a few of these.
    """
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    results = []
    for number, layout in enumerate([None, *LAYOUTS[gpus]]):
        config = make_config(
            tmp_path / f"layout_{number}",
            model={"compute_dtype": dtype} | (layout or {}),
            data={"micro_batch_size": 1},
            ckpt={"interval": 6},
            log={"checksum_interval": 6},
            deployment={"type": "single_node", "num_train_gpus": 1 if layout is None else gpus},
        )
        results.append(run_command(config, tmp_path / f"layout_{number}.json", os.environ))
    alone, *others = results
    for layout, other in zip(LAYOUTS[gpus], others, strict=True):
        for a, b in zip(alone, other, strict=True):
            assert a["digest/rows"] == b["digest/rows"], layout
            assert b["loss/mean"] == pytest.approx(a["loss/mean"], rel=loss_limit), layout
            assert b["optim/grad_norm"] == pytest.approx(a["optim/grad_norm"], rel=norm_limit), layout


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_and_two_gpus_start_from_the_same_files(tmp_path):
    """Weights of a bf16 Hugging Face folder streamed into shards, a held-out set with votes on stopping over NCCL, and
    HF weights beside the checkpoint: equal on one and two GPUs, and the exported folder gives the run's last bpb."""
    folder = tmp_path / "model"
    torch.manual_seed(0)
    arch = {key: value for key, value in ARCH.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(**arch)).to(torch.bfloat16).save_pretrained(folder, max_shard_size="2MB")
    val = {"interval": 6, "sets": [{"name": "held", "path": str(QUICKSTART / "heldout")}], "seq_lens": [512]}
    tables = {
        "tokenizer": {"name": str(QUICKSTART / "tokenizer")},
        "val": val | {"eval_on_start": True, "micro_batch_tokens": 2048},
        "data": {"micro_batch_size": 2},
    }
    results = []
    for name, gpus in (("one", 1), ("two", 2)):
        model = {"arch": None, "init": None, "name": str(folder), "compute_dtype": "float32"}
        config = make_config(
            tmp_path / name,
            model=model,
            deployment={"type": "single_node", "num_train_gpus": gpus},
            ckpt={"weights": True},
            **tables,
        )
        results.append(run_command(config, tmp_path / f"{name}.json", os.environ))
    one, two = results
    for a, b in zip(one, two, strict=True):
        assert b["loss/mean"] == pytest.approx(a["loss/mean"], rel=1e-5)
        assert b.get("val/held/bpb@512") == pytest.approx(a.get("val/held/bpb@512"), rel=1e-5)
    exported = tmp_path / "two" / "run" / "weights" / "step_12"
    model = {"arch": None, "init": None, "name": str(exported), "compute_dtype": "float32"}
    config = make_config(
        tmp_path / "again", model=model, max_steps=0, deployment={"type": "single_node", "num_train_gpus": 1}, **tables
    )
    path = tmp_path / "again.json"
    assert run_command(config, path, os.environ) == []
    (start,) = map(json.loads, (config.output_dir / "run" / "metrics.jsonl").read_text().splitlines())
    assert start["val/held/bpb@512"] == pytest.approx(two[-1]["val/held/bpb@512"], rel=1e-5)
