"""A checksum of all parameters: two runs whose weights are equal bit for bit have the same one, on any number of ranks.

Every element is hashed to 64 bits with its bits, its place in the parameter and the parameter's name; the checksum is
the sum of all hashes in two lanes, their low and high 32 bits, each modulo 2^32, with no carry between them. A sum can
be taken shard by shard and over ranks in any order. The finaliser that mixes the bits is that of SplitMix64 (Steele,
Lea, Flood 2014, doi:10.1145/2714064.2660195).
"""

from collections.abc import Mapping
from hashlib import blake2b

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.shards import local_range
from trainer.parallel.mesh import Mesh

_CHUNK = 1 << 22  # elements hashed at once: bounds the memory of the 64-bit intermediates
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
_LANE = 0xFFFFFFFF


def parameter_checksum(parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's part of the checksum, on the parameters' device, without waiting for it.

    Args:
        parameters: by canonical name; plain tensors, or DTensors sharded on dimension 0, of which the local shard
            counts, on every rank that has it.

    Returns:
        Low and high 32 bits, () float64 each: whole numbers whose sums over up to 2^21 ranks are exact.

    Raises:
        ValueError: a parameter of another placement.
    """
    device = next(iter(parameters.values())).device
    lanes = torch.zeros(2, dtype=torch.int64, device=device)
    with torch.no_grad():
        for name, parameter in parameters.items():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            start, _ = local_range(name, parameter)
            key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
            bits = local.detach().reshape(-1).view(_BITS[local.dtype])
            for offset in range(0, bits.numel(), _CHUNK):
                hashes = _hash(bits[offset : offset + _CHUNK], start + offset, key)
                # A chunk's sums stay below 2^54; with a carry out of the low one, they would depend on the shards.
                lanes += torch.stack([(hashes & _LANE).sum(), (hashes >> 32 & _LANE).sum()])
                lanes &= _LANE
    low, high = lanes.to(torch.float64).unbind()
    return low, high


def checksum_sums(parameters: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """What `read_checksum` needs the sums of over all ranks: () float64 each, on the parameters' device. Arguments as
    in `parameter_checksum`."""
    low, high = parameter_checksum(parameters)
    if mesh.dp_replicate == 1:
        return {"checksum_low": low, "checksum_high": high}
    counted = 1 if mesh.is_first_replica else 0
    sums = {"checksum_low": low * counted, "checksum_high": high * counted}
    return sums | {"replicas_low": low, "replicas_high": high}


def read_checksum(sums: Mapping[str, float], mesh: Mesh) -> tuple[int, int] | None:
    """Low and high 32 bits of the parameters' checksum, not reduced modulo 2^32; None where the replicas' parameters
    are not equal bit for bit, as they must be.

    Args:
        sums: those of `checksum_sums` over all ranks, and others.
    """
    lanes = int(sums["checksum_low"]), int(sums["checksum_high"])
    if mesh.dp_replicate == 1:
        return lanes
    of_all = int(sums["replicas_low"]), int(sums["replicas_high"])
    equal = all((mesh.dp_replicate * lane - total) & _LANE == 0 for lane, total in zip(lanes, of_all, strict=True))
    return lanes if equal else None


def _hash(bits: Tensor, start: int, key: int) -> Tensor:
    """Hashes (n,) int64 of consecutive elements; arithmetic modulo 2^64, as int64 wraps."""
    places = torch.arange(start, start + bits.numel(), dtype=torch.int64, device=bits.device)
    # The place is mixed on its own first: added to the bits as it is, neighbours could trade places unseen.
    hashes = _mix(places.add_(key)).add_(bits)
    return _mix(hashes)


def _mix(values: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values.bitwise_xor_(_shifted(values, shift)).mul_(factor - 2**64)
    return values.bitwise_xor_(_shifted(values, 31))


def _shifted(values: Tensor, shift: int) -> Tensor:
    """A logical shift to the right: torch's own drags the sign along."""
    return values.bitwise_right_shift(shift).bitwise_and_((1 << 64 - shift) - 1)
