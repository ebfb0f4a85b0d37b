"""Our signature: one global batch gives one loss and one gradient, however it is split. In float64, to 1e-12."""

import itertools
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def setting(micro_batch_size=1, *, family="qwen3", ac=None, defer=None, tied=False, **extra) -> dict:
    values = {"micro_batch_size": micro_batch_size, "family": family, "ac": ac, "defer": defer, "tied": tied}
    return values | {"masters": "float64", "replicas": 1, "cp": 1, "cp_style": "ulysses"} | extra


def model_of(used: dict) -> tuple[str, bool]:
    return used["family"], used["tied"]


STEPS = [
    setting(2, steps=3, reload=True),
    setting(2, steps=3, tied=True),
    setting(2, steps=0),
    setting(2, steps=0, tied=True),
]
HSDP: dict[str, Any] = {"replicas": 2}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [HSDP, {"cp": 2}, {"cp": 2, "cp_style": "ring"}],
    4: [HSDP, {"replicas": 4}, {"cp": 2}, {"replicas": 2, "cp": 2, "cp_style": "ring"}],
}
"""By the number of ranks: replicas of the weights, ranks that share rows, or both, besides plain FSDP."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one rank computes in the unwrapped form."""

    gradients: dict[tuple[str, bool], dict[str, Tensor]]
    """Of the whole batch at once, by the family and whether the head is tied."""

    first_half: dict[str, Tensor]
    """Gradients of the batch's first four rows alone."""

    weights: dict[tuple[bool, int], dict[str, Tensor]]
    """By whether the head is tied and the number of steps."""

    checkpoint: Path
    """Of the first of STEPS, with optimizer state."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What several ranks compute, each entry with its setting."""

    gradients: list[tuple[dict, dict[str, Tensor]]]
    masked: list[tuple[dict, dict[str, Tensor]]]
    reloaded: list[tuple[dict, dict[str, Tensor]]]
    unbroken: list[tuple[dict, dict[str, Tensor]]]
    empty: list[tuple[dict, dict[str, Tensor]]]
    mixed: list[tuple[dict, dict[str, Tensor]]]
    relay: list[tuple[dict, dict[str, Tensor]]]

    last_checkpoint: Path
    """Of the relay."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    whole = [setting(8), setting(8, tied=True), setting(8, family="qwen2"), setting(8, family="smollm3", tied=True)]
    settings = [*whole, setting(4, only_first=True), *STEPS]
    folder = tmp_path_factory.mktemp("reference")
    results = run_ranks(1, settings, folder / "out.pt")
    gradients, (first_half, *weights) = results[: len(whole)], results[len(whole) :]
    return Reference(
        gradients={model_of(used): result for used, result in zip(whole, gradients, strict=True)},
        first_half=first_half,
        weights={(used["tied"], used["steps"]): result for used, result in zip(STEPS, weights, strict=True)},
        checkpoint=folder / f"run_1_{len(whole) + 1}" / "checkpoints" / "step_1",
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
        parts = [value.norm() for name, value in expected.items() if f"clipped.{name}" in expected]
        assert result["norm"].item() == pytest.approx(torch.stack(parts).norm().item(), rel=1e-12)
        assert result["norm"] > 0.5, "or clipping would do nothing"
        for name in [name for name in expected if f"clipped.{name}" in expected]:
            scaled = expected[name] * (0.5 / result["norm"])
            torch.testing.assert_close(result[f"clipped.{name}"], scaled, rtol=1e-10, atol=1e-14)


def settings_of(world_size: int, checkpoint: Path) -> dict[str, list[dict]]:
    """What the ranks compute, by the field of Ranks."""
    sizes = [size for size in (1, 2, 4) if size * world_size <= 8]
    layouts = LAYOUTS[world_size]
    deferrals = [[None, "all", "replicas"] if "replicas" in layout else [None, "all"] for layout in layouts]
    gradients = [setting(size, defer=defer) for size in sizes for defer in (None, "all")]
    gradients += [setting(1, defer=defer, ac=ac) for defer in (None, "all") for ac in ("selective", "full")]
    gradients += [setting(1, defer=defer, tied=True) for defer in (None, "all")]
    gradients += [setting(1, family="qwen2", defer="all"), setting(2, family="smollm3", tied=True, ac="selective")]
    for layout, ways in zip(layouts, deferrals, strict=True):
        some = zip(ways, (None, "full", "selective"), strict=False)
        pairs = itertools.product(ways, (None, "full")) if layout == HSDP else some
        gradients += [setting(4 // world_size, defer=defer, ac=ac, **layout) for defer, ac in pairs]
    steps = [setting(1, steps=3, defer=defer, tied=defer is not None) for defer in (None, "all")]
    steps.append(setting(1, steps=3, defer=deferrals[-1][-1], **layouts[-1]))
    empty = [setting(2, steps=1, masked_from=0, defer=defer, tied=defer is not None) for defer in (None, "all")]
    masked = [setting(max(sizes), masked_from=4, defer=defer) for defer in (None, "all")]
    return {
        "gradients": gradients,
        "masked": [*masked, setting(1, masked_from=4)],
        "reloaded": [used | {"reload": True} for used in steps],
        "unbroken": steps,
        "empty": [*empty, setting(2, steps=1, masked_from=0, defer="replicas", **HSDP)],
        "mixed": [setting(1, masters="float32"), setting(1, masters="float32", defer="replicas", **HSDP)],
        "relay": [setting(relay=str(checkpoint), layouts=[{}, *layouts, {}])],
    }


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, reference, tmp_path_factory) -> Ranks:
    groups = settings_of(request.param, reference.checkpoint)
    every = [used for group in groups.values() for used in group]
    folder = tmp_path_factory.mktemp("ranks")
    pairs = iter(zip(every, run_ranks(request.param, every, folder / "out.pt"), strict=True))
    found = {name: list(itertools.islice(pairs, len(group))) for name, group in groups.items()}
    relay = folder / f"run_{request.param}_{len(every) - 1}" / "checkpoints"
    return Ranks(**found, last_checkpoint=relay / f"step_{len(every[-1]['layouts'])}")


def test_one_rank(reference, tmp_path):
    """Field cases R12, R14: micro-batch sizes; both forms of gradient sync; activation checkpointing."""
    settings = [setting(size, ac=ac) for size in (1, 2, 4) for ac in (None, "selective", "full")]
    settings += [setting(size, tied=True) for size in (1, 2, 4)]
    settings += [
        setting(2, defer=defer, ac=ac, tied=tied, sharded_at_one_rank=True)
        for defer, ac, tied in itertools.product((None, "all"), (None, "full"), (False, True))
    ]
    assert_same(settings, run_ranks(1, settings, tmp_path / "out.pt"), reference)


def test_gradients_of_several_ranks(ranks, reference):
    """Field cases R12, R13, R81: ranks times micro-batches times deferral times activation checkpointing; replicas,
    ranks that share rows, and both.

    R108: tokens of rows that ranks share count once, or the mean would be another. Biases (qwen2, smollm3), layers
    without RoPE and a scaled RoPE (smollm3) are no different.
    """
    assert_same([used for used, _ in ranks.gradients], [result for _, result in ranks.gradients], reference)


def test_rows_without_loss(ranks, reference):
    """Field cases R15, R18: on one of two ranks or in a whole micro-batch, they leave the gradients of the others."""
    for used, result in ranks.masked:
        assert_close(result, reference.first_half, 1e-12, used)


def test_step_without_loss_token(ranks, reference):
    """It leaves every bit of the first weights, which are those of one rank, and so their checksum."""
    for used, result in ranks.empty:
        untouched = reference.weights[used["tied"], 0]
        assert [name for name in untouched if not torch.equal(result[name], untouched[name])] == []


def test_steps_go_on(ranks, reference):
    """Field cases R70, R74: a tied head stays one parameter through sharding, loading and steps; what is loaded on
    several ranks goes on bit for bit, nothing random is restored, since nothing random is stored.

    With four ranks some hold no row of the q/k norms: their optimizer has empty tensors.
    """
    for (used, result), (_, unbroken) in zip(ranks.reloaded, ranks.unbroken, strict=True):
        assert_close(result, reference.weights[used["tied"], 3], 1e-9, used)
        assert [name for name in unbroken if not torch.equal(result[name], unbroken[name])] == []


def test_mixed_precision(ranks, reference):
    """Field cases R84, R86: with bf16 compute all masters and gradients, norms' too, are fp32."""
    for used, result in ranks.mixed:
        assert_mixed(result, reference.gradients[model_of(used)])


def test_checkpoints_go_round(ranks, reference, stored_tensors):
    """Those of one rank and of every layout load in any other, bit for bit; the worker checks each, and that each
    number is stored once."""
    stored = stored_tensors(reference.checkpoint)
    assert {"model.norm.weight", "exp_avg.model.norm.weight", "step.model.norm.weight"} <= stored.keys()
    ((_, relayed),) = ranks.relay
    for found in (relayed, stored_tensors(ranks.last_checkpoint)):
        assert found.keys() == stored.keys()
        assert [name for name in stored if not torch.equal(stored[name], found[name])] == []
