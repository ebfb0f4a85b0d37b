"""Context parallelism on CUDA: exact in float64, no less exact than one GPU in bfloat16, no host sync."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

from models.base import CausalLM
from models.batch import Batch
from models.init import init_weights
from models.layers.context_parallel.ulysses import Ulysses
from models.registry import build_config, build_model
from trainer.data.collate import collate
from trainer.data.row import Rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WORKER = Path(__file__).with_name("context_parallel_gpu_worker.py")
VOCAB, SEQ_LEN = 512, 1024
ARCH: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """NCCL with one rank."""
    torch._dynamo.reset()
    counters.clear()
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    torch.cuda.set_sync_debug_mode("default")
    dist.destroy_process_group()
    torch._dynamo.reset()


def make_model() -> CausalLM:
    with torch.device("meta"):
        config = build_config(ARCH, tokenizer_length=None, special_ids={})
        model = build_model(config, seq_len=SEQ_LEN, attn="varlen", dtype=torch.bfloat16)
    model.to_empty(device="cuda")
    init_weights(dict(model.named_parameters()), std=0.1, seed=0, rules=model.init_rules())
    return model


def make_batch(seed: int) -> Batch:
    """Two rows of documents of random lengths, pinned."""
    generator = np.random.default_rng(seed)
    rows = Rows.empty(2, SEQ_LEN)
    tokens = generator.integers(0, VOCAB, (2, SEQ_LEN + 1))
    rows.input_ids[:], rows.labels[:] = tokens[:, :-1], tokens[:, 1:]
    for row in range(2):
        ends = np.unique([*generator.integers(1, SEQ_LEN, 5 + 3 * seed), SEQ_LEN])
        rows.segment_lengths[row] = np.diff(ends, prepend=0)
    return collate(rows, full_rows=False, pin_memory=True)


def measure(model: CausalLM, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad()
    output = model(batch.to(torch.device("cuda")))
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return gradients | {"nats": output.nats}


def test_whole_graphs_without_host_syncs(group: dist.ProcessGroup) -> None:
    """The operators on CUDA: a rank that shares rows with itself alone, compiled, recomputing; documents vary."""
    model, plain = make_model(), make_model()
    model.share_rows(Ulysses(group))
    for one in (model, plain):
        one.apply_activation_checkpointing("selective", 1)
        one.compile_blocks("default", fullgraph=True)
    batches = [make_batch(seed) for seed in range(4)]
    expected = [measure(plain, batch) for batch in batches]
    measure(model, batches[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.cuda.set_sync_debug_mode("error")
        found = [measure(model, batch) for batch in batches]
        torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            # Another fusion may round an activation to the other neighbour in bfloat16.
            assert (ours[name].float() - value.float()).norm() <= 2**-6 * value.float().norm(), name


def _error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of the worst gradient, norm-wise."""
    assert found.keys() == expected.keys()
    names = [name for name in expected if name != "loss"]
    differences = ((found[name].double() - expected[name]).norm() / expected[name].norm() for name in names)
    return max(difference.item() for difference in differences)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_two_gpus_give_the_gradients_of_one(tmp_path: Path) -> None:
    """Both styles, over packed documents, sharded by FSDP. bfloat16 is held against float64: sharing rows rounds no
    more than one GPU does, but for the sum of two rounded halves of a gradient (at most 2^-8 of it)."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    fixed = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command = [sys.executable, str(WORKER), str(tmp_path / "out.pt")]
    processes = [
        subprocess.Popen(command, env=os.environ | fixed | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=400) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    results = torch.load(tmp_path / "out.pt", weights_only=True)
    exact, one = results.pop("one, float64"), results.pop("one")
    limit = _error(one, exact) + 2**-8
    assert len(results) == 10 and 1e-4 < limit < 0.1
    for name, found in results.items():
        error = _error(found, exact)
        if name.endswith("float64"):
            assert error < 1e-12, (name, error)
            assert found["loss"].item() == pytest.approx(exact["loss"].item(), rel=1e-12), name
        else:
            assert error < limit, (name, error, limit)
            assert found["loss"].item() == pytest.approx(exact["loss"].item(), rel=1e-3), name
