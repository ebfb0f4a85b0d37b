"""Initial weights: what they are, and that they depend on seed and name alone."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.base import ones
from models.init import BLOCK_ELEMENTS, init_weights


def _draw(tensor: torch.Tensor, name: str = "a.weight", seed: int = 0, **rules) -> torch.Tensor:
    init_weights({name: tensor}, std=0.02, seed=seed, rules=rules)
    return tensor


def test_matrices_are_normal_norms_one_the_rest_zero(make_model) -> None:
    model = make_model("qwen3", attention_bias=True)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        torch.nn.init.constant_(parameter, 7.0)
    init_weights(parameters, std=0.02, seed=0, rules=model.init_rules())
    for name, parameter in parameters.items():
        if "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.15), name
            assert abs(parameter.mean().item()) < 0.002, name


def test_moments_of_a_large_matrix() -> None:
    drawn = _draw(torch.empty(512, 1024)) / 0.02
    assert drawn.mean().item() == pytest.approx(0, abs=0.006)
    assert drawn.var().item() == pytest.approx(1, abs=0.01)
    assert drawn.pow(4).mean().item() == pytest.approx(3, abs=0.06)
    assert drawn.unique().numel() > 0.95 * drawn.numel()  # no block repeats another


def test_unknown_names_and_shapes_never_raise() -> None:
    parameters = {
        "what.ever": torch.empty(3),
        "scalar": torch.empty(()),
        "empty": torch.empty(0, 4),
        "conv": torch.empty(2, 3, 4),
    }
    init_weights(parameters, std=0.02, seed=0, rules={})
    assert parameters["what.ever"].tolist() == [0, 0, 0]
    assert parameters["scalar"].item() == 0
    assert (parameters["conv"] != 0).all()


def test_a_rule_of_the_family_wins() -> None:
    def ramp(generator: np.random.Generator, count: int) -> np.ndarray:
        return np.arange(count, dtype=np.float32)

    tensor = _draw(torch.empty(2 * BLOCK_ELEMENTS + 3), "A_log", A_log=ramp)
    assert tensor[BLOCK_ELEMENTS - 1] == BLOCK_ELEMENTS - 1
    assert tensor[-3:].tolist() == [0, 1, 2]
    assert _draw(torch.empty(2, 2), "gain", gain=ones).tolist() == [[1, 1], [1, 1]]


def test_values_are_pinned() -> None:
    """Runs made with one version of numpy must be repeatable with the next."""
    assert [f"{value:.7f}" for value in _draw(torch.empty(2, 2)).flatten().tolist()] == [
        "0.0348433",
        "-0.0216513",
        "0.0148806",
        "-0.0014098",
    ]


def test_values_depend_on_seed_and_name_only() -> None:
    reference = _draw(torch.empty(300, 700))
    assert torch.equal(_draw(torch.empty(300, 700)), reference)
    assert torch.equal(_draw(torch.empty(300, 700, dtype=torch.float64)).float(), reference)
    assert torch.equal(_draw(torch.empty(300, 700, dtype=torch.bfloat16)), reference.bfloat16())
    assert not torch.equal(_draw(torch.empty(300, 700), seed=1), reference)
    assert not torch.equal(_draw(torch.empty(300, 700), "b.weight"), reference)


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _on_each_rank(world_size: int, shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: list) -> list:
    """What every rank of a pretended world holds after init_weights, in rank order."""
    parts = []
    for rank in range(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        mesh = init_device_mesh("cpu", mesh_shape)
        rows = torch.arange(shape[0])
        for placement, index, size in zip(placements, mesh.get_coordinate(), mesh_shape, strict=True):
            if isinstance(placement, Shard):
                pieces = [*rows.chunk(size), *[rows[:0]] * size]
                rows = pieces[index]
        local = torch.full((len(rows), *shape[1:]), torch.nan)
        sharded = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=torch.empty(shape).stride()
        )
        init_weights({"a.weight": sharded}, std=0.02, seed=0, rules={})
        parts.append(local)
        dist.destroy_process_group()
    return parts


@pytest.mark.parametrize("shape", [(8, 4), (7, 5), (3, 2), (301, 700), (1, 70_000)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_hold_their_part_of_the_same_values(fake_ranks, shape, world_size) -> None:
    """Field case R92 and SPEC 5: even, uneven and empty shards; the same weights for 1, 2 and 4 ranks."""
    parts = _on_each_rank(world_size, shape, (world_size,), [Shard(0)])
    assert torch.equal(torch.cat(parts), _draw(torch.empty(shape)))


def test_replicas_hold_the_same_shards(fake_ranks) -> None:
    parts = _on_each_rank(4, (5, 3), (2, 2), [Replicate(), Shard(0)])
    assert torch.equal(torch.cat(parts[:2]), _draw(torch.empty(5, 3)))
    assert torch.equal(torch.cat(parts[2:]), _draw(torch.empty(5, 3)))


def test_other_placements_are_refused(fake_ranks) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    sharded = DTensor.from_local(torch.empty(4, 2), init_device_mesh("cpu", (2,)), [Shard(1)], run_check=False)
    with pytest.raises(ValueError, match=r"a\.weight is placed as"):
        init_weights({"a.weight": sharded}, std=0.02, seed=0, rules={})
