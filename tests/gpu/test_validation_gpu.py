"""Held-out sets of every kind on a GPU: no result depends on micro-batches or ranks, the numbers are the CPU's, nothing
waits for the device, and training's graphs stay as they are. Memory: test_memory_gpu.py."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from configs.model import ModelConfig
from configs.sft import SFTConfig
from configs.validation import SuiteConfig
from models.base import CausalLM
from models.registry import build_config
from trainer.hooks import HookContext
from trainer.model_setup import build_parallel_model, set_first_weights
from trainer.parallel.mesh import one_rank_mesh
from trainer.run import Run, StopSignal
from trainer.tokenizer import load_tokenizer
from trainer.train import Trainer
from trainer.validation import Validation, build_validation
from trainer.validation.results import WAIT_LABEL

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

COMMAND = [sys.executable, "-c", "import sys; from trainer.sft import main; sys.exit(main())"]
VOCAB_SIZE, SEQ_LENS = 384, [128, 512]
ARCH = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
NUM_ROWS = 32


def some_text(generator: np.random.Generator, most: int) -> str:
    words = ("ba", "kori", "tu", "selmon", "東京", "🐕", "x = 1")
    return " ".join(generator.choice(words, generator.integers(1, most)))


@pytest.fixture
def suite(tmp_path: Path) -> dict[str, Any]:
    """The table of a suite of all five kinds."""
    generator, folder = np.random.default_rng(0), tmp_path / "sets"
    (folder / "shards").mkdir(parents=True)
    lengths = generator.integers(2, 900, NUM_ROWS)
    tokens = generator.integers(2, 300, lengths.sum()).astype("<u2")
    tokens[np.cumsum(lengths) - 1] = 0
    path = folder / "shards" / "00000.ds"
    tokens.tofile(path)
    np.cumsum(lengths).astype("<u8").tofile(f"{path}.index")
    Path(f"{path}.metadata").write_text(f"tiny|2\n{tokens.size}\n")
    rows: dict[str, list[dict[str, Any]]] = {"texts": [], "continuations": [], "pairs": [], "choices": []}
    for _ in range(NUM_ROWS):
        context = some_text(generator, 60)
        options = [f" {some_text(generator, 8)}" for _ in range(4)]
        rows["texts"].append({"text": some_text(generator, 300)})
        rows["continuations"].append({"context": context, "continuation": f" {some_text(generator, 60)}"})
        rows["pairs"].append({"context": context, "chosen": options[0], "rejected": options[1]})
        rows["choices"].append({"context": context, "choices": options, "answer": int(generator.integers(4))})
    for name, table in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    return {"data_dir": str(folder), "sets": ["shards", *rows], "seq_lens": SEQ_LENS, "micro_batch_tokens": 2048}


def make_validation(table: dict[str, Any], tokenizer: Path, folder: Path, device: str = "cuda") -> Validation:
    validation = build_validation(
        SuiteConfig.model_validate(table),
        tokenizer=load_tokenizer(str(tokenizer)),
        vocab_size=VOCAB_SIZE,
        mesh=one_rank_mesh(torch.device(device)),
        pin_memory=device == "cuda",
        cache_dir=folder / "cache",
    )
    assert validation is not None
    return validation


def make_model(device: str = "cuda", **table: Any) -> CausalLM:
    """The same weights on every device."""
    config = ModelConfig.model_validate({"arch": ARCH, "init": {"std": 0.1}, **table})
    mesh = one_rank_mesh(torch.device(device))
    arch_config = build_config(ARCH, tokenizer_length=None, special_ids={})
    model, grad_sync = build_parallel_model(config, arch_config, seq_len=max(SEQ_LENS), mesh=mesh)
    set_first_weights(config, model, grad_sync, mesh, folder=None)
    return model


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch._dynamo.reset()


def assert_close(found: dict[str, float], expected: dict[str, float], rel: float) -> None:
    """Shares of documents may differ by one of them, where two options lie within the rounding of bfloat16."""
    assert found.keys() == expected.keys() and len(expected) == 28
    for name, value in expected.items():
        if "/acc" in name:
            assert found[name] == pytest.approx(value, abs=1.01 / NUM_ROWS), name
        elif "/margin" in name:
            assert found[name] == pytest.approx(value, rel=rel, abs=100 * rel), name  # of nats of about 100
        else:
            assert found[name] == pytest.approx(value, rel=rel), name


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_bfloat16_results_do_not_depend_on_micro_batches(compiled, suite, tiny_tokenizer, tmp_path):
    model = make_model(compile={"fullgraph": True} if compiled else None)
    results = []
    for micro_batch_tokens in (512, 2048, 16384):
        table = suite | {"micro_batch_tokens": micro_batch_tokens}
        metrics = make_validation(table, tiny_tokenizer, tmp_path).run(model)
        assert metrics is not None
        results.append(metrics)
    assert_close(results[1], results[0], rel=1e-4)
    assert_close(results[2], results[0], rel=1e-4)


def test_a_round_repeats_bit_for_bit(suite, tiny_tokenizer, tmp_path):
    """The reductions of the round itself add up in one order."""
    model, validation = make_model(), make_validation(suite, tiny_tokenizer, tmp_path)
    first = validation.run(model)
    assert first is not None
    for _ in range(3):
        assert validation.run(model) == first


def test_float32_results_are_those_of_the_cpu(suite, tiny_tokenizer, tmp_path):
    """Every window: nats to 1e-5, first choices, counts of tokens and bytes exactly."""
    found = []
    for device in ("cpu", "cuda"):
        model = make_model(device, compute_dtype="float32").eval()
        found.append(make_validation(suite, tiny_tokenizer, tmp_path, device).score_own_rows(model))
    assert len(found[0]) == 5 * len(SEQ_LENS)
    for cpu, gpu in zip(*found, strict=True):
        assert np.array_equal(cpu[:, 2:], gpu[:, 2:])
        np.testing.assert_allclose(gpu[:, :2], cpu[:, :2], rtol=1e-5)
    assert sum(array[:, 2].sum() for array in found[0]) > 0, "some first choices were right"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_passes_without_host_sync(compiled, suite, tiny_tokenizer, tmp_path):
    """Between the first pass of a round and its last nothing waits for the device implicitly."""
    model = make_model(compile={"fullgraph": True} if compiled else None)
    validation = make_validation(suite, tiny_tokenizer, tmp_path)
    expected = validation.run(model)

    def watch(done: int, total: int) -> None:
        if done in (1, total):
            torch.cuda.set_sync_debug_mode("error" if done == 1 else "default")

    assert validation.run(model, watch) == expected


def test_trace_shows_only_the_labelled_waits(suite, tiny_tokenizer, tmp_path):
    """On the main thread no stream, device or event synchronisation but for a pass that was enqueued earlier."""
    model, validation = make_model(), make_validation(suite, tiny_tokenizer, tmp_path)
    validation.run(model)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        validation.run(model)
        torch.cuda.synchronize()
    trace = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    waits = [event for event in events if event["name"] == WAIT_LABEL]
    assert len(waits) >= 10
    main_thread = waits[0]["tid"]
    first, last = (choose(event["ts"] for event in waits) for choose in (min, max))

    def is_labelled(event: dict[str, Any]) -> bool:
        return any(wait["ts"] <= event["ts"] <= wait["ts"] + wait["dur"] for wait in waits)

    syncs = [
        event["name"]
        for event in events
        if "Synchronize" in event["name"] and event["tid"] == main_thread and first <= event["ts"] <= last
        if not is_labelled(event)
    ]
    assert syncs == []
    assert any(event["name"] == "cudaLaunchKernel" and event["tid"] == main_thread for event in events)


class Graphs:
    """A hook that counts the graphs compiled by the end of each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def before_optimizer_step(self, context: HookContext) -> None:
        pass

    def after_optimizer_step(self, context: HookContext) -> None:
        self.counts.append(counters["stats"]["unique_graphs"])

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def test_rounds_leave_the_graphs_of_training_alone(suite, tiny_tokenizer, tmp_path, monkeypatch):
    """One graph of training, one for each length at the first round, and none after it in steps or rounds."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    data = {"type": "fake", "seq_len": 256, "batch_size": 8, "micro_batch_size": 4, "length": "variable"}
    values = {
        "model": {"arch": ARCH, "init": {}, "compile": {"fullgraph": True}},
        "tokenizer": {"name": str(tiny_tokenizer)},
        "data": data | {"input_ids": "random"},
        "val": suite | {"interval": 3},
        "max_steps": 10,
        "output_dir": str(tmp_path / "runs"),
        "run": {"name": "run"},
    }
    run_dir = tmp_path / "runs" / "run"
    run_dir.mkdir(parents=True)
    trainer = Trainer(SFTConfig.model_validate(values), Run(dir=run_dir, attempt=0, stop=StopSignal()))
    graphs = Graphs()
    trainer.hooks.append(graphs)
    try:
        trainer.run()
    finally:
        trainer.close()
    assert graphs.counts[2:] == [1] + [1 + len(SEQ_LENS)] * 7
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "val/texts/bpb@128" in record] == [3, 6, 9]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_and_two_gpus_agree(suite, tiny_tokenizer, tmp_path):
    """The command, scoring only, over NCCL in fp32: every metric to 1e-6, every document's record."""
    import pyarrow.parquet as pq

    metrics, records = [], []
    for gpus in (1, 2):
        values = {
            "model": {"arch": ARCH, "init": {"std": 0.1}, "compute_dtype": "float32"},
            "tokenizer": {"name": str(tiny_tokenizer)},
            "val": suite | {"save_arrays": True},
            "max_steps": 0,
            "output_dir": str(tmp_path / f"{gpus}"),
            "run": {"name": "run"},
            "deployment": {"num_train_gpus": gpus},
        }
        path = tmp_path / f"{gpus}.json"
        path.write_text(json.dumps(values))
        done = subprocess.run([*COMMAND, "@", path], env=os.environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        run_dir = tmp_path / f"{gpus}" / "run"
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        (found,) = [record for record in lines if "val/texts/bpb@128" in record]
        metrics.append({name: value for name, value in found.items() if name.startswith("val/")})
        arrays = sorted((run_dir / "val" / "step_0").glob("*.parquet"))
        assert [file.stem for file in arrays] == sorted(suite["sets"])
        records.append([row for file in arrays for row in pq.read_table(file).to_pylist()])
    one, two = metrics
    assert_close(two, one, rel=1e-6)
    for a, b in zip(*records, strict=True):
        for key in ("seq_len", "document", "tokens", "bytes"):
            assert a[key] == b[key]
        assert b["nats"] == pytest.approx(a["nats"], rel=1e-5, abs=1e-5)
