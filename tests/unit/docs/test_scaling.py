"""docs/scaling.md: its simulation gives what was measured, its tables are those of benchmarks/scaling.py."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("scaling")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def model(scaling: ModuleType) -> ModuleType:
    return sys.modules["scaling_model"]


def test_measured_steps_of_several_gpus_are_reproduced(scaling: ModuleType) -> None:
    """Within 10 % each, from one GPU alone."""
    ratios = {
        result.name: scaling.simulated_seconds(result, base) / result.values["seconds_per_step"]
        for result, base in scaling.measurements()
    }
    assert {"h200x2_1b_causal", "h200x2_1b_documents"} <= ratios.keys()
    assert {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > 0.1} == {}


def test_one_gpu_takes_what_was_measured(scaling: ModuleType, model: ModuleType) -> None:
    for name in ("h200_1b_causal", "h200_1b_4k_documents"):
        base = scaling.base_of(name)
        time = model.step_time(base.work, base.plan, scaling.load_cluster())
        assert time.total == pytest.approx(base.values["seconds_per_step"], rel=1e-12)


def test_the_page_has_the_tables_of_the_script(scaling: ModuleType) -> None:
    text = scaling.PAGE.read_text()
    assert scaling.filled(text) == text, "run `python benchmarks/scaling.py --write`"


def test_predictions_go_from_8_to_1024_gpus(scaling: ModuleType) -> None:
    rows = [line.split(" | ")[0].strip("| ") for line in scaling.predicted_1b().splitlines()[2:]]
    assert rows == ["8", "16", "32", "64", "128", "256", "512", "1,024"]


@pytest.fixture
def plain_cluster(scaling: ModuleType):
    """Links of 1 byte/s, and nothing else that takes time."""
    inf = float("inf")
    return replace(
        scaling.load_cluster(),
        copy_bytes_per_second=inf,
        fsdp_copy_bytes_per_second=inf,
        optimizer_seconds_per_parameter=0.0,
        norm_seconds_per_parameter=0.0,
        nvlink_bytes_per_second=1.0,
        network_bytes_per_second=1.0,
        link_efficiency=1.0,
        base_latency=0.0,
        nvlink_latency=0.0,
        network_latency=0.0,
    )


def small_work(model: ModuleType):
    shape = model.Shape(num_blocks=1, block_params=4, root_params=2, heads=4, kv_heads=2, head_dim=8)
    return model.Work(shape=shape, seconds=9.0, head_share=1 / 3, attention_share=0.0, tokens=64)


def test_a_step_followed_by_hand(model: ModuleType, plain_cluster) -> None:
    """Two ranks, one block of 4 parameters, 2 outside: forward 2 s, head 3 s, backward 4 s.

    Gathered: root 0 to 2, block 2 to 6; forward 6 to 8, head to 11; block gathered to 15, backward to 19; gradients
    of the block to 27, of the root to 31; twice 8 bytes for the norm, 4 s each.
    """
    time = model.step_time(small_work(model), model.Plan(gpus=2), plain_cluster)
    assert (time.total, time.compute, time.exposed) == pytest.approx((39.0, 9.0, 30.0))


def test_replicas_by_hand(model: ModuleType, plain_cluster) -> None:
    """Two nodes of 2 ranks as two replicas. Within the node all is as before: the block's gradients are there at 27,
    the root's at 31. Both shards of the block are 16 bytes, over two ports of 1 byte/s 8 s: 27 to 35; the root's 8
    bytes take 4 s, to 39. The norm's 8 bytes over all four ranks take 6 s each time."""
    cluster = replace(plain_cluster, gpus_per_node=2, ports_per_node=2)
    time = model.step_time(small_work(model), model.Plan(gpus=4, replicas=2), cluster)
    assert time.total == pytest.approx(39 + 2 * 6)


def test_what_is_deferred_is_done_once(model: ModuleType, plain_cluster) -> None:
    """Two micro-batches on the same nodes with a slow network: over it the block's gradients take 160 s and the root's
    80 s, in each micro-batch from 27 on or in the last one only. The norms take 2 x 60 s. What a micro-batch does
    besides hides at most 40 s."""
    cluster = replace(plain_cluster, gpus_per_node=2, ports_per_node=2, network_bytes_per_second=0.05)
    plan = model.Plan(gpus=4, replicas=2, micro_batches=2)
    seconds = {
        name: model.step_time(small_work(model), replace(plan, **options), cluster)
        for name, options in (
            ("each", {}),
            ("replicas", {"defer_replicate_sync": True}),
            ("all", {"defer_grad_sync": True}),
        )
    }
    assert seconds["each"].total == pytest.approx(27 + 2 * (160 + 80) + 2 * 60)
    assert seconds["each"].total - seconds["replicas"].total > 160 + 80 - 40
    assert seconds["all"].total < seconds["replicas"].total


def test_bytes_that_shared_rows_exchange(model: ModuleType) -> None:
    """64 tokens on 2 ranks. Ulysses: 2 bytes, 32 tokens, 4 + 4 + 2 + 2 heads of 8, half of it. Ring: one turn, 1.5
    chunks of 16 tokens on average, keys and values of 2 heads of 8."""
    shape = small_work(model).shape
    plan = model.Plan(gpus=2, cp=2)
    assert model.exchanged_bytes(shape, 64, plan) == 2 * 32 * 12 * 8 / 2
    assert model.exchanged_bytes(shape, 64, replace(plan, cp_style="ring")) == 2 * 1.5 * 16 * 2 * 2 * 8


def test_rings_of_whole_nodes(scaling: ModuleType) -> None:
    cluster = scaling.load_cluster()
    assert cluster.ring(3.6e9, 8) == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 3.6e9 * 7 / 8 / 360e9)
    assert cluster.ring(3.2e9, 16) == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 9.6e-6 + 3.2e9 * 15 / 16 / 320e9)
    assert cluster.ring(3.2e9, 1) == 0.0
    assert scaling.load_cluster(1).network == pytest.approx(40e9)
