"""Copies of the training tensors that later steps cannot touch, made before the background write begins.

The library's DefaultStager would be the natural choice; in torch 2.11 it can be used once only (it drops its pinned
memory after each call), and it copies a DTensor's mesh, process groups and all, with every tensor.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

PINNED_BYTES = 2**20
"""Shards from this size on get pinned memory: for smaller ones registering costs more than a slower copy."""


class Stager:
    """Copies tensors to host memory, which it keeps for the next save: pinning is slow, copying into it is not."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}
        self._host_meshes: dict[DeviceMesh, DeviceMesh] = {}

    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the CPU, valid until the next call. Waits for the device: a deliberate host sync.

        Args:
            tensors: plain tensors or DTensors, on any device.

        Returns:
            The same names; DTensors stay DTensors with the same placements, on a CPU mesh.
        """
        staged: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            copy = self._buffer(name, local)
            copy.copy_(local, non_blocking=True)
            staged[name] = self._shard_like(tensor, copy) if isinstance(tensor, DTensor) else copy
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return staged

    def close(self) -> None:
        """Free the host memory."""
        for name in list(self._buffers):
            self._free(name)

    def _buffer(self, name: str, local: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == local.shape and buffer.dtype == local.dtype:
            return buffer
        if buffer is not None:
            self._free(name)
        buffer = self._buffers[name] = torch.empty(local.shape, dtype=local.dtype, device="cpu")
        if self._pins(buffer):
            # Not `pin_memory=True`: that allocator rounds each size up to a power of two.
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)))
        return buffer

    def _free(self, name: str) -> None:
        buffer = self._buffers.pop(name)
        if self._pins(buffer):
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(int(runtime.cudaHostUnregister(buffer.data_ptr())))

    def _pins(self, buffer: Tensor) -> bool:
        return self._device.type == "cuda" and buffer.nbytes >= PINNED_BYTES

    def _shard_like(self, tensor: DTensor, copy: Tensor) -> DTensor:
        return DTensor.from_local(
            copy,
            self._host_mesh(tensor.device_mesh),
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def _host_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The same ranks as a CPU mesh; on a CUDA mesh `from_local` would move the copies back to the GPU.

        The groups are only a label here: laying out shards needs coordinates, no collective.
        """
        if mesh.device_type == "cpu":
            return mesh
        if mesh not in self._host_meshes:
            groups = mesh.get_all_groups()
            names = mesh.mesh_dim_names or tuple(f"dim_{dim}" for dim in range(mesh.ndim))
            self._host_meshes[mesh] = (
                DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=names)
                if len(groups) == 1
                else DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)
            )
        return self._host_meshes[mesh]
