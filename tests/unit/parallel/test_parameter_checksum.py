"""The parameters' checksum against the same arithmetic on Python's whole numbers, and what it must notice."""

from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.parallel import checksum as room
from trainer.parallel.checksum import checksum_sums, parameter_checksum, read_checksum
from trainer.parallel.mesh import Mesh, one_rank_mesh

_WORD = 2**64


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % _WORD
    return value ^ (value >> 31)


def _expected(parameters: dict[str, Tensor], unsigned: type[np.unsignedinteger]) -> int:
    signed = np.dtype(unsigned).str.replace("u", "i")
    low = high = 0
    for name, parameter in parameters.items():
        key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        for place, bits in enumerate(parameter.numpy().reshape(-1).view(signed).tolist()):
            value = _mix((_mix((place + key) % _WORD) + bits) % _WORD)
            low, high = low + value % 2**32, high + (value >> 32)
    return low % 2**32 + (high % 2**32 << 32)


def _checksum(parameters: dict[str, Tensor]) -> int:
    low, high = parameter_checksum(parameters)
    assert low.dtype == high.dtype == torch.float64
    return int(low) + (int(high) << 32)


@pytest.mark.parametrize(("dtype", "unsigned"), [(torch.float32, np.uint32), (torch.float64, np.uint64)])
def test_equals_the_definition(
    dtype: torch.dtype, unsigned: type[np.unsignedinteger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_CHUNK", 7)  # several chunks, the last one short
    generator = torch.Generator().manual_seed(1)
    parameters = {
        "a.weight": torch.randn(5, 6, generator=generator, dtype=dtype),
        "b": torch.randn(3, generator=generator, dtype=dtype),
        "empty": torch.zeros(0, 4, dtype=dtype),
    }
    assert _checksum(parameters) == _expected(parameters, unsigned)


def test_shards_sum_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows on other ranks, lanes summed and then reduced, as digest/params is formatted."""
    whole = torch.randn(16, 5, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(room, "local_range", lambda name, shard: (int(shard.storage_offset()), 0))
    lanes = torch.stack([torch.stack(parameter_checksum({"w": part})) for part in whole.split([5, 1, 7, 3])]).sum(0)
    assert lanes[0] > 2**32, "or nothing would be carried"
    low, high = (int(lane) % 2**32 for lane in lanes)
    assert low + (high << 32) == _checksum({"w": whole})


def test_notices_every_kind_of_difference() -> None:
    values = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    swapped = values.clone()
    swapped[0, 0], swapped[0, 1] = values[0, 1], values[0, 0]
    last_bit = values.clone()
    last_bit[2, 3] = torch.nextafter(values[2, 3], torch.tensor(100.0))
    sign_of_zero = values.clone()
    sign_of_zero[0, 0] = -0.0
    kinds = [
        {"w": values, "v": torch.ones(2)},
        {"w": swapped, "v": torch.ones(2)},
        {"w": last_bit, "v": torch.ones(2)},
        {"w": sign_of_zero, "v": torch.ones(2)},
        {"v": values, "w": torch.ones(2)},
        {"w": values},
    ]
    assert len({_checksum(kind) for kind in kinds}) == len(kinds)
    assert _checksum({"v": torch.ones(2), "w": values.clone()}) == _checksum(kinds[0]), "the order of names is nothing"


def _mesh(rank: int) -> Mesh:
    """One of 4 ranks: 2 replicas of 2 shards."""
    return replace(one_rank_mesh(torch.device("cpu")), rank=rank, world_size=4, dp_replicate=2)


@pytest.mark.parametrize("differs", [False, True])
def test_replicas_count_once_and_are_compared(differs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    other = whole.clone()
    if differs:
        other[4, 1] = torch.nextafter(whole[4, 1], torch.tensor(100.0))
    monkeypatch.setattr(room, "local_range", lambda name, shard: (int(shard.storage_offset()), 0))
    shards = [*whole.split(4), *other.split(4)]
    of_ranks = [checksum_sums({"w": shard}, _mesh(rank)) for rank, shard in enumerate(shards)]
    sums = {name: sum(sums[name].item() for sums in of_ranks) for name in of_ranks[0]}
    found = read_checksum(sums, _mesh(3))
    if differs:
        assert found is None
    else:
        assert found is not None
        low, high = (lane % 2**32 for lane in found)
        assert low + (high << 32) == _checksum({"w": whole})
