"""Data parallelism in two forms behind one interface.

Above one rank FSDP2 shards the master weights and gathers copies in the compute dtype; with replicas (HSDP) gradients
are summed within each replica, then over replicas. At one rank there is nothing to gather: the model holds the copies
itself, refreshed once per step, and FSDP's copies in and out of flat buffers are saved. Both keep master weights in
the dtype of `model.optimization_dtype`, and gradient sums in it or fp32, under the same names.

Frozen parameters (see models.lora) come in the compute dtype and stay so: no master, no gradient, no copy to refresh.
Above one rank they are sharded and gathered like the others.

The optimizer sees plain local tensors in both forms, never DTensors: their dispatch costs host time per parameter, and
fused updates of DTensors have leaked (pytorch issue 188174).
"""

import itertools
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from models.base import CausalLM
from trainer.parallel.mesh import Mesh


class GradSync(Protocol):
    """Owner of the master weights and of the way gradients get to them."""

    def materialize(self, device: torch.device) -> None:
        """Give the meta tensors memory. Values are undefined until they are drawn or loaded."""
        ...

    @property
    def masters(self) -> dict[str, Tensor]:
        """This rank's part of each master weight by canonical name: plain tensors, what the optimizer updates."""
        ...

    @property
    def frozen(self) -> dict[str, Tensor]:
        """This rank's part of each frozen parameter by canonical name: plain tensors, what the forward pass reads."""
        ...

    def as_global(self, name: str, local: Tensor) -> Tensor:
        """The tensor of which `local`, laid out like master or frozen parameter `name`, is this rank's part: for
        checkpoints and init."""
        ...

    def before_backward(self, is_last: bool) -> None:
        """Say whether the backward pass about to run is the step's last."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """This rank's part of the summed gradients, after the last backward pass."""
        ...

    def clear_gradients(self) -> None: ...

    def publish(self) -> None:
        """Let the forward pass see the masters' new values."""
        ...


def apply_data_parallel(
    model: CausalLM,
    mesh: Mesh,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    defer_grad_sync: bool = False,
    defer_replicate_sync: bool = False,
    cpu_offload: bool = False,
) -> GradSync:
    """Change a meta-device model, built in the masters' dtype, frozen parameters in the compute dtype, into its
    data-parallel form. See configs.model for the options."""
    if mesh.device_mesh is None:
        return LocalGradSync(model, compute_dtype)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload_policy = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh.device_mesh, "mp_policy": policy, "offload_policy": offload_policy}
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    _prefetch(model)
    return ShardedGradSync(model, defer=defer_grad_sync, defer_replicas=defer_replicate_sync, cpu_offload=cpu_offload)


def _prefetch(model: CausalLM) -> None:
    """Have each unit start the gathering of the next block before its own forward pass. FSDP alone starts it when the
    host comes to that block: too late where the host is hardly ahead of the device, as with small blocks or weights
    that come from host memory. The backward pass does so by itself, in the order of the forward pass."""
    units = [model, *model.blocks]
    for unit, following in itertools.pairwise(units):
        assert isinstance(unit, FSDPModule) and isinstance(following, FSDPModule)
        unit.set_modules_to_forward_prefetch([following])


class ShardedGradSync:
    """FSDP2. Gradients are plain sums over ranks: the loss already carries 1 / loss tokens of the global batch."""

    def __init__(
        self, model: CausalLM, *, defer: bool = False, defer_replicas: bool = False, cpu_offload: bool = False
    ) -> None:
        """
        Args:
            defer: reduce gradients after the last backward pass of a step only; weights stay gathered until then.
            defer_replicas: reduce them within a replica after each, over replicas after the last only.
            cpu_offload: masters and gradients lie in pinned host memory, and the optimizer works there. The host waits
                for the gradients of each backward pass.
        """
        self._model = model
        self._defer, self._defer_replicas = defer, defer_replicas
        self._cpu_offload = cpu_offload
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            # gloo has no averaging reduce-scatter: without the forced sum a divide factor of 1 is refused there.
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)

    def materialize(self, device: torch.device) -> None:
        self._model.to_empty(device="cpu" if self._cpu_offload else device)
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        for unit in self._units:
            # The first unshard moves uneven shards into padded buffers; views taken before it would go stale.
            unit.unshard()
            unit.reshard()
        self._parameters: dict[str, DTensor] = {
            name: parameter
            for name, parameter in self._model.canonical_parameters().items()
            if isinstance(parameter, DTensor)
        }
        parts = {name: parameter.to_local().detach() for name, parameter in self._parameters.items()}
        self._masters = {name: part for name, part in parts.items() if self._parameters[name].requires_grad}
        self._frozen = {name: part for name, part in parts.items() if name not in self._masters}

    @property
    def masters(self) -> dict[str, Tensor]:
        return self._masters

    @property
    def frozen(self) -> dict[str, Tensor]:
        return self._frozen

    def as_global(self, name: str, local: Tensor) -> Tensor:
        parameter = self._parameters[name]
        if self._cpu_offload:
            # As FSDP makes them: `from_local` would move the part to the mesh's device, a copy that nobody reads.
            return DTensor(local, parameter._spec, requires_grad=False)  # pyright: ignore[reportCallIssue]
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def before_backward(self, is_last: bool) -> None:
        root = self._units[0]
        if self._defer:
            root.set_requires_gradient_sync(is_last)
            root.set_reshard_after_backward(is_last)
            root.set_is_last_backward(is_last)
        elif self._defer_replicas:
            root.set_requires_all_reduce(is_last)

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: parameter.grad.to_local()
            for name, parameter in self._parameters.items()
            if isinstance(parameter.grad, DTensor)
        }

    def clear_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def publish(self) -> None:
        """The next all-gather reads the masters themselves. Without a backward pass since the last forward pass, units
        are still gathered, and would be read as they are: a scored model that is then given other weights."""
        for unit in self._units:
            unit.reshard()


class LocalGradSync:
    """One rank: master weights beside the model's copies in the compute dtype, or the same tensors if that is equal."""

    def __init__(self, model: CausalLM, compute_dtype: torch.dtype) -> None:
        self._model = model
        self._compute_dtype = compute_dtype

    def materialize(self, device: torch.device) -> None:
        self._model.to_empty(device=device)
        self._masters: dict[str, Tensor] = {}
        self._copies: dict[str, nn.Parameter] = {}
        self._frozen: dict[str, Tensor] = {}
        names = self._model.wrapped_names
        for path_and_leaf, parameter in list(self._model.named_parameters()):
            name = names.get(path_and_leaf, path_and_leaf)
            if not parameter.requires_grad:
                self._frozen[name] = parameter.detach()
                continue
            if parameter.dtype == self._compute_dtype:
                self._masters[name] = parameter.detach()
                self._copies[name] = parameter
                continue
            copy = nn.Parameter(parameter.detach().to(self._compute_dtype))
            path, _, leaf = path_and_leaf.rpartition(".")
            setattr(self._model.get_submodule(path), leaf, copy)
            self._masters[name] = parameter.detach()
            self._copies[name] = copy
        self._gradients: dict[str, Tensor] = {}
        for name, copy in self._copies.items():
            copy.register_post_accumulate_grad_hook(self._adder(name))

    def _adder(self, name: str):
        """Moves a finished gradient into the sum of the masters' dtype, fp32 at least, at once: no bf16 sum is ever
        kept."""
        dtype = torch.promote_types(self._masters[name].dtype, torch.float32)

        def add(copy: Tensor) -> None:
            gradient, copy.grad = copy.grad, None
            assert gradient is not None
            if name in self._gradients:
                self._gradients[name].add_(gradient)
            else:
                self._gradients[name] = gradient.to(dtype)

        return add

    @property
    def masters(self) -> dict[str, Tensor]:
        return self._masters

    @property
    def frozen(self) -> dict[str, Tensor]:
        return self._frozen

    def as_global(self, name: str, local: Tensor) -> Tensor:
        return local

    def before_backward(self, is_last: bool) -> None:
        """Gradients are summed as they come; there is no one to share them with."""

    def gradients(self) -> dict[str, Tensor]:
        return self._gradients

    def clear_gradients(self) -> None:
        self._gradients = {}

    def publish(self) -> None:
        stale = [name for name, master in self._masters.items() if self._copies[name].dtype != master.dtype]
        if stale:
            with torch.no_grad():
                copies: list[Tensor] = [self._copies[name] for name in stale]
                masters = [self._masters[name] for name in stale]
                torch._foreach_copy_(copies, masters)  # pyright: ignore[reportPrivateImportUsage]
