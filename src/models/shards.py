"""Which part of a sharded parameter this rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


def local_range(name: str, parameter: Tensor) -> tuple[int, int]:
    """Range [start, stop) of the row-major elements of a parameter that this rank holds: all of a plain tensor.

    Raises:
        ValueError: a DTensor that is neither replicated nor sharded on dimension 0.
    """
    if not isinstance(parameter, DTensor):
        return 0, parameter.numel()
    coordinate = parameter.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not in the mesh of {name}")
    start, stop = 0, parameter.size(0) if parameter.dim() else 1
    for placement, index, size in zip(parameter.placements, coordinate, parameter.device_mesh.shape, strict=True):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard or placement.dim != 0:
            raise ValueError(f"{name} is placed as {placement}; only shards of dimension 0 are known here")
        rows_per_rank = -(-(stop - start) // size)  # the first ranks get full shards, the last ones less or nothing
        start, stop = min(start + index * rows_per_rank, stop), min(start + (index + 1) * rows_per_rank, stop)
    row = parameter.numel() // max(parameter.size(0), 1) if parameter.dim() else 1
    return start * row, stop * row
