"""Our signature: one global batch gives one loss and one gradient, however it is split. In float64, to 1e-12."""

import itertools
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

WORKER = Path(__file__).with_name("gradient_worker.py")


def run_ranks(world_size: int, settings: list[dict], out: Path) -> list[dict[str, Tensor]]:
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


def setting(micro_batch_size=1, *, family="qwen3", ac=None, defer=False, tied=False, **extra) -> dict:
    values = {"micro_batch_size": micro_batch_size, "family": family, "ac": ac, "defer": defer, "tied": tied}
    return values | {"masters": "float64"} | extra


def model_of(used: dict) -> tuple[str, bool]:
    return used["family"], used["tied"]


STEPS = [setting(2, steps=3), setting(2, steps=3, tied=True), setting(2, steps=0), setting(2, steps=0, tied=True)]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one rank computes in the unwrapped form."""

    gradients: dict[tuple[str, bool], dict[str, Tensor]]
    """Of the whole batch at once, by the family and whether the head is tied."""

    first_half: dict[str, Tensor]
    """Gradients of the batch's first four rows alone."""

    weights: dict[tuple[bool, int], dict[str, Tensor]]
    """By whether the head is tied and the number of steps."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    whole = [setting(8), setting(8, tied=True), setting(8, family="qwen2"), setting(8, family="smollm3", tied=True)]
    settings = [*whole, setting(4, only_first=True), *STEPS]
    results = run_ranks(1, settings, tmp_path_factory.mktemp("reference") / "out.pt")
    gradients, (first_half, *weights) = results[: len(whole)], results[len(whole) :]
    return Reference(
        gradients={model_of(used): result for used, result in zip(whole, gradients, strict=True)},
        first_half=first_half,
        weights={(used["tied"], used["steps"]): result for used, result in zip(STEPS, weights, strict=True)},
    )


def assert_close(result: dict[str, Tensor], expected: dict[str, Tensor], limit: float, used: dict) -> None:
    assert result.keys() == expected.keys()
    assert ("lm_head.weight" in result) == (not used["tied"])
    for name, value in result.items():
        difference = (value - expected[name]).norm() / expected[name].norm()
        assert value.dtype == torch.float64 and difference < limit, (used, name, difference.item())


def assert_mixed(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """float32, and as near as forward and backward in bfloat16 come."""
    names = [name for name in expected if f"clipped.{name}" in expected]
    assert names and {result[name].dtype for name in names} == {torch.float32}
    worst = max(((result[name] - expected[name]).norm() / expected[name].norm()).item() for name in names)
    assert 1e-4 < worst < 0.1


def assert_same(settings: list[dict], results: list[dict[str, Tensor]], reference: Reference) -> None:
    assert len(settings) == len(results)
    for used, result in zip(settings, results, strict=True):
        expected = reference.gradients[model_of(used)]
        assert_close(result, expected, 1e-12, used)
        # Field case R81: the norm is that of the whole gradient, and clipping scales by it.
        squares = [value.square().sum() for name, value in expected.items() if f"clipped.{name}" in expected]
        assert result["norm"].item() == pytest.approx(sum(squares).sqrt().item(), rel=1e-12)
        assert result["norm"] > 0.5, "or clipping would do nothing"
        for name in [name for name in expected if f"clipped.{name}" in expected]:
            scaled = expected[name] * (0.5 / result["norm"])
            torch.testing.assert_close(result[f"clipped.{name}"], scaled, rtol=1e-10, atol=1e-14)


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
    """Field cases R12, R13, R81: ranks times micro-batches times deferral times activation checkpointing.

    R15, R18: rows without loss, on one of two ranks or in a whole micro-batch, leave the gradients of the others; a
    step without any loss token leaves every bit of the first weights, which are those of one rank, and so their
    checksum. R70: a tied head stays one parameter through sharding, loading and steps. R74: what is loaded on several
    ranks goes on bit for bit; nothing random is restored, since nothing random is stored. With four ranks some hold no
    row of the q/k norms: their optimizer has empty tensors. Biases (qwen2, smollm3), layers without RoPE and a scaled
    RoPE (smollm3) are no different. R84, R86: with bf16 compute all masters and gradients, norms' too, are fp32.
    """
    sizes = [size for size in (1, 2, 4) if size * world_size <= 8]
    settings = [
        setting(size, defer=defer, ac=ac)
        for size, defer, ac in itertools.product(sizes, (False, True), (None, "selective", "full"))
    ]
    settings += [setting(1, defer=defer, tied=True) for defer in (False, True)]
    settings += [setting(1, family="qwen2", defer=True), setting(2, family="smollm3", tied=True, ac="selective")]
    masked = [setting(max(sizes), masked_from=4, defer=defer) for defer in (False, True)] + [setting(1, masked_from=4)]
    steps = [setting(1, steps=3, reload=True, defer=defer, tied=defer) for defer in (False, True)]
    unbroken = [used | {"reload": False} for used in steps]
    empty = [setting(2, steps=1, masked_from=0, defer=defer, tied=defer) for defer in (False, True)]
    mixed = setting(1, masters="float32")
    every = [*settings, *masked, *steps, *unbroken, *empty, mixed]
    *results, last = run_ranks(world_size, every, tmp_path / "out.pt")
    results = iter(results)
    assert_same(settings, list(itertools.islice(results, len(settings))), reference)
    for used, result in zip(masked, itertools.islice(results, len(masked)), strict=True):
        assert_close(result, reference.first_half, 1e-12, used)
    reloaded = list(itertools.islice(results, len(steps)))
    for used, result, other in zip(steps, reloaded, itertools.islice(results, len(steps)), strict=True):
        assert_close(result, reference.weights[used["tied"], 3], 1e-9, used)
        assert [name for name in other if not torch.equal(result[name], other[name])] == []
    for used, result in zip(empty, results, strict=True):
        untouched = reference.weights[used["tied"], 0]
        assert [name for name in untouched if not torch.equal(result[name], untouched[name])] == []
    assert_mixed(last, reference.gradients[model_of(mixed)])
