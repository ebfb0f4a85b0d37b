"""Our signature: one global batch gives one loss and one gradient, however it is split. In float64, to 1e-12."""

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("gradient_worker.py")


def run_ranks(world_size: int, settings: list[dict], out: Path) -> list[dict[str, torch.Tensor]]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(world_size):
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        processes.append(subprocess.Popen([sys.executable, WORKER, out, json.dumps(settings)], env=env))
    try:
        assert [process.wait(timeout=240) for process in processes] == [0] * world_size
    finally:
        for process in processes:
            process.kill()
    return torch.load(out, weights_only=True)


def setting(micro_batch_size=1, *, ac=None, defer=False, tied=False, **extra) -> dict:
    return {"micro_batch_size": micro_batch_size, "ac": ac, "defer": defer, "tied": tied} | extra


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> dict[bool, dict[str, torch.Tensor]]:
    """One rank, the whole batch at once, by whether the head is tied."""
    out = tmp_path_factory.mktemp("reference") / "out.pt"
    untied, tied = run_ranks(1, [setting(8), setting(8, tied=True)], out)
    return {False: untied, True: tied}


def assert_same(settings: list[dict], results: list[dict[str, torch.Tensor]], reference) -> None:
    assert len(settings) == len(results)
    for used, result in zip(settings, results, strict=True):
        expected = reference[used["tied"]]
        assert result.keys() == expected.keys()
        assert ("lm_head.weight" in result) == (not used["tied"])
        for name, value in result.items():
            difference = (value - expected[name]).norm() / expected[name].norm()
            assert value.dtype == torch.float64 and difference < 1e-12, (used, name, difference.item())


def test_one_rank(reference, tmp_path):
    """Field cases R12, R14: micro-batch sizes; both forms of gradient sync; activation checkpointing."""
    settings = [setting(size, ac=ac) for size in (1, 2, 4) for ac in (None, "selective", "full")]
    settings += [setting(size, tied=True) for size in (1, 2, 4)]
    settings += [
        setting(2, defer=defer, ac=ac, tied=tied, sharded_at_one_rank=True)
        for defer, ac, tied in itertools.product((False, True), (None, "full"), (False, True))
    ]
    assert_same(settings, run_ranks(1, settings, tmp_path / "out.pt"), reference)


@pytest.mark.parametrize("world_size", [2, 4])
def test_several_ranks(world_size, reference, tmp_path):
    """Field cases R12, R13, R81: ranks times micro-batches times deferral times activation checkpointing."""
    sizes = [size for size in (1, 2, 4) if size * world_size <= 8]
    settings = [
        setting(size, defer=defer, ac=ac)
        for size, defer, ac in itertools.product(sizes, (False, True), (None, "selective", "full"))
    ]
    settings += [setting(1, defer=defer, tied=True) for defer in (False, True)]
    assert_same(settings, run_ranks(world_size, settings, tmp_path / "out.pt"), reference)
