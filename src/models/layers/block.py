"""The unit of activation checkpointing, compilation and sharding: one block of a decoder."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from models.layers.context_parallel.ring import RING_ATTENTION
from models.layers.offload import ActivationOffload, storage_addresses
from models.layers.self_attention import SequenceContext

RecomputeMode = Literal["full", "selective"]


class BlockRunner:
    """Runs the body of a block: as it is, recomputed in the backward pass, compiled, or both.

    It stands inside the block's `forward`, not around the module: parameter names stay the same, and the hooks that
    FSDP puts around a module's call stay outside the compiled graph.
    """

    def __init__(self, body: Callable[..., Any]) -> None:
        """
        Args:
            body: method of the block.
        """
        self._body = body
        self._recompute: RecomputeMode | None = None
        self._compiled: Callable[..., Any] | None = None
        self._offload: ActivationOffload | None = None
        self._index = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the body gives."""
        run = self._run if self._compiled is None else self._compiled
        if self._offload is None or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        # Read at each call: FSDP swaps the parameters for gathered ones. The first argument is the hidden states.
        kept = storage_addresses([*self._parameters(), args[1:], kwargs])
        with self._offload.running(self._index, kept):
            return run(*args, **kwargs)

    def recompute_activations(self, mode: RecomputeMode) -> None:
        """Keep only the block's input for the backward pass (`full`), or also the results of matrix products and
        attention (`selective`)."""
        self._recompute = mode

    def offload_activations(self, offload: ActivationOffload, index: int) -> None:
        """Keep what is saved for the backward pass in host memory.

        Args:
            offload: shared by the model's blocks.
            index: place of this block among them.
        """
        self._offload, self._index = offload, index

    def _parameters(self) -> list[Tensor]:
        module = getattr(self._body, "__self__", None)
        return list(module.parameters()) if isinstance(module, nn.Module) else []

    def compile(self, mode: str, fullgraph: bool) -> None:
        """Compile what a call runs. Blocks that look alike share one graph."""
        # dynamic=False: a second shape (validation) gets a static graph of its own; else training itself would land
        # on a slower dynamic one. Sizes marked dynamic stay dynamic.
        self._compiled = torch.compile(self._run, mode=mode, fullgraph=fullgraph, dynamic=False)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._recompute is None or not torch.is_grad_enabled():
            return self._body(*args, **kwargs)
        options: dict[str, Any] = {"context_fn": _selective_contexts} if self._recompute == "selective" else {}
        # The blocks draw no random numbers, and reading the generator's state can make the host wait for the GPU.
        return checkpoint(self._body, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)


class DecoderBlock(nn.Module):
    """Base of our blocks. Subclasses write `body`."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = BlockRunner(self.body)

    def body(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """(rows, seq_len, hidden_size) -> the same."""
        raise NotImplementedError

    def forward(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """(rows, seq_len, hidden_size) -> the same."""
        return self.runner(hidden, context)


_SAVED_OPS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
        RING_ATTENTION,
    }
)


def _keep_products(_context: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


_selective_contexts = partial(create_selective_checkpoint_contexts, _keep_products)
