"""What one block of a model keeps between its forward and backward pass, and needs besides in the latter.

Found by running the block on the meta device, where tensors have shapes and no memory: autograd itself says what it
saves. Compiled blocks are traced and split as torch.compile does it, without generating code.
"""

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.base import CausalLM
from models.batch import Batch, Segments
from models.layers.block import BlockRunner
from models.layers.norm import RMSNorm
from models.layers.offload import tensors_in
from models.layers.outline import norm_outline
from trainer.memory.graph import extra_bytes


@dataclass(frozen=True, kw_only=True)
class BlockMemory:
    """Bytes on the device."""

    saved: int
    """Kept from the forward to the backward pass, the block's input included."""

    backward: int
    """At the most in the backward pass, beyond what was kept and the gradient of the result."""

    context: int
    """What all blocks read besides, such as the table of RoPE."""


def measure_block(model: CausalLM, index: int, *, rows: int, seq_len: int, compiled: bool) -> BlockMemory:
    """Memory of one block.

    Args:
        model: on the meta device, its parameters in the compute dtype, with activation checkpointing if any.
        index: of the block.
        rows: of a micro-batch.
        seq_len: of a rank's share of a row.
        compiled: torch.compile is used.
    """
    block, runner = model.blocks[index], model.block_runners[index]
    args, kwargs = _arguments(model, block, meta_batch(rows, seq_len))
    hidden, others = args[0].detach().requires_grad_(), (*args[1:], kwargs)
    trace = _compiled_trace if compiled else _eager_trace
    saved, backward = trace(block, runner, hidden, args[1:], kwargs)
    context = {id(tensor): tensor.nbytes for tensor in tensors_in(others)}
    return BlockMemory(saved=saved, backward=backward, context=sum(context.values()))


def meta_batch(rows: int, seq_len: int) -> Batch:
    """A micro-batch without values, one document per row."""
    ids = torch.empty((rows, seq_len), dtype=torch.int64, device="meta")
    borders = seq_len * torch.arange(rows + 1, dtype=torch.int32)
    segments = Segments(
        cu_seqlens=borders.to("meta"),
        host_cu_seqlens=borders,
        max_seqlen_carrier=torch.empty((seq_len, 0), device="meta"),
        full_rows=True,
    )
    return Batch(
        input_ids=ids,
        labels=ids,
        position_ids=ids,
        segments=segments,
        num_loss_tokens=ids.numel(),
        num_padding_tokens=0,
        attention_pairs=0,
    )


class _ReachedError(Exception):
    """Carries a block's arguments out of a forward pass."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args_of_block, self.kwargs_of_block = args, kwargs


def _arguments(model: CausalLM, block: nn.Module, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model calls `block` with. Blocks before it run without gradients."""

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _ReachedError(args, kwargs)

    handle = block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            model(batch)
    except _ReachedError as reached:
        return reached.args_of_block, reached.kwargs_of_block
    finally:
        handle.remove()
    raise AssertionError("the model does not call its block")


class _LiveBytes(TorchDispatchMode):
    """Counts the storages that are alive of those made under it."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self._known = known  # alive, so that no other storage gets their place
        self.now = self.most = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _eager_trace(
    block: nn.Module, runner: BlockRunner, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, int]:
    for module in block.modules():
        if isinstance(module, RMSNorm):
            # One kernel on CUDA; the meta device would take it apart, and each part would save its input.
            module.forward = _fused_norm(module)  # pyright: ignore[reportAttributeAccessIssue]
    known = [*block.parameters(), hidden, *tensors_in((args, kwargs))]
    with _LiveBytes(known) as live:
        output = runner(hidden, *args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        saved = live.now - output.untyped_storage().nbytes()  # the result is the next block's input
        grad = torch.empty_like(output)
        start = live.most = live.now
        output.backward(grad)
        backward = live.most - start
    for parameter in block.parameters():
        parameter.grad = None
    return saved + hidden.nbytes, backward


def _fused_norm(norm: RMSNorm) -> Callable[[Tensor], Tensor]:
    return lambda hidden: norm_outline(hidden, norm.weight)[0]


def _compiled_trace(
    block: nn.Module, runner: BlockRunner, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, int]:
    backwards: list[int] = []

    def run_forward(module: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(module.forward)

    def run_backward(module: fx.GraphModule, _: Any) -> Any:
        backwards.append(extra_bytes(module.graph))
        return make_boxed_func(module.forward)

    def partition(module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        arguments: dict[str, Any] = options | {"compiler": "inductor"}
        return min_cut_rematerialization_partition(module, inputs, **arguments)

    backend = aot_autograd(
        fw_compiler=run_forward,
        bw_compiler=run_backward,
        partition_fn=partition,
        decompositions=cast(Any, select_decomp_table),
    )
    kept = {parameter.untyped_storage()._cdata for parameter in [*block.parameters(), *tensors_in((args, kwargs))]}
    saved: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:
            saved[storage._cdata] = (storage.nbytes(), storage)
        return tensor

    # Compiled selective recomputation is advised against for blocks that change tensors in place; ours do not.
    advice = logging.getLogger("torch._higher_order_ops.wrap")
    level = advice.level
    advice.setLevel(logging.ERROR)
    torch._dynamo.reset()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = torch.compile(runner._run, backend=backend, dynamic=False)(hidden, *args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        output.backward(torch.empty_like(output))
    finally:
        torch._dynamo.reset()
        advice.setLevel(level)
    for parameter in block.parameters():
        parameter.grad = None
    return sum(size for size, _ in saved.values()), max(backwards, default=0)
