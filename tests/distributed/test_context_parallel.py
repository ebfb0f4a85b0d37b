"""Ranks that share rows give the loss, the gradients and the validation of one rank. In float64."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

WORKER = Path(__file__).with_name("context_parallel_worker.py")
Cases = dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, write_shard: Callable[..., Path]) -> Cases:
    """What 4 ranks found and what one rank finds, by case: all of it from one process group."""
    folder = tmp_path_factory.mktemp("context_parallel")
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 67, size) for size in generator.integers(1, 60, 12)]
    write_shard(folder / "shards" / "00000.ds", documents)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(WORKER), str(folder / "out.pt"), str(folder / "shards"), str(port)]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)
    try:
        assert process.wait(timeout=240) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    results = torch.load(folder / "out.pt", weights_only=True)
    assert len({name for name, *_ in results}) == len(results)
    return {name: (found, expected) for name, found, expected in results}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest norm-wise difference."""
    assert found.keys() == expected.keys() and found
    assert all(tensor.dtype == torch.float64 for tensor in (*found.values(), *expected.values()))
    if not expected.get("hits", torch.ones(1)).any():
        assert not found["hits"].any()
        found, expected = ({name: tensor for name, tensor in of.items() if name != "hits"} for of in (found, expected))
    return max(((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected)


def test_loss_and_gradients_are_those_of_one_rank(cases: Cases) -> None:
    """Documents across the borders of shares, padding, several rows, grouped heads, one key-value head for all ranks,
    q/k norms, layers without RoPE, recomputed and compiled blocks; nats, hits and logits stand where they belong."""
    differences = {name: worst(*pair) for name, pair in cases.items() if not name.endswith("validation")}
    assert {name: difference for name, difference in differences.items() if difference > 1e-12} == {}
    for ranks in (2, 4):
        for style in ("ulysses", "ring"):
            assert f"{style}, {ranks} ranks: one key-value head, packed" in differences
            assert f"{style}, {ranks} ranks: recurrence" in differences
    assert "ulysses, 2 ranks: compiled, whole rows" in differences
    assert "ring, 2 ranks: compiled, other documents" in differences
    assert sum(expected["hits"].sum().item() for _, expected in cases.values() if "hits" in expected) > 5


def test_tokens_are_counted_once(cases: Cases) -> None:
    """Field case R108: ranks that share rows count their loss tokens together once, in training and in validation."""
    for name, (found, expected) in cases.items():
        if name.endswith("step"):
            assert found["loss tokens"].item() == expected["loss tokens"].item() > 50, name
        if name.endswith("validation"):
            counted = [key for key in expected if "token" in key or "document" in key]
            assert [found[key].item() for key in counted] == [expected[key].item() for key in counted], name


def test_validation_does_not_change(cases: Cases) -> None:
    """Conversations and held-out shards, at two lengths."""
    rounds = {name: pair for name, pair in cases.items() if name.endswith("validation")}
    assert len(rounds) == 4
    for name, (found, expected) in rounds.items():
        assert {"val/loss", "val/perplexity"} < expected.keys()
        for key, value in expected.items():
            assert found[key].item() == pytest.approx(value.item(), rel=1e-9), (name, key)
