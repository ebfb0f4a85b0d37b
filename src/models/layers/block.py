"""The unit of activation checkpointing, compilation and sharding: one block of a decoder."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from models.layers.attention import SequenceContext

RecomputeMode = Literal["full", "selective"]


class DecoderBlock(nn.Module):
    """Base of the blocks. Subclasses write `body`.

    Checkpointing and compilation wrap `body` inside `forward`, not the module: parameter names stay the same, and the
    hooks that FSDP puts around a module's call stay outside the compiled graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._recompute: RecomputeMode | None = None
        self._compiled: Callable[[Tensor, SequenceContext], Tensor] | None = None

    def body(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """(rows, seq_len, hidden_size) -> the same."""
        raise NotImplementedError

    def forward(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """(rows, seq_len, hidden_size) -> the same."""
        run = self._run if self._compiled is None else self._compiled
        return run(hidden, context)

    def recompute_activations(self, mode: RecomputeMode) -> None:
        """Keep only the block's input for the backward pass (`full`), or also the results of matrix products and
        attention (`selective`)."""
        self._recompute = mode

    def compile_body(self, mode: str, fullgraph: bool) -> None:
        """Compile what `forward` runs. Blocks that look alike share one graph."""
        # dynamic=False: a second shape (validation) gets a static graph of its own; else training itself would land
        # on a slower dynamic one. Sizes marked dynamic stay dynamic.
        self._compiled = torch.compile(self._run, mode=mode, fullgraph=fullgraph, dynamic=False)

    def _run(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        if self._recompute is None or not torch.is_grad_enabled():
            return self.body(hidden, context)
        options: dict[str, Any] = {"context_fn": _selective_contexts} if self._recompute == "selective" else {}
        # The blocks draw no random numbers, and reading the generator's state can make the host wait for the GPU.
        result = checkpoint(self.body, hidden, context, use_reentrant=False, preserve_rng_state=False, **options)
        assert isinstance(result, Tensor)
        return result


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
    }
)


def _keep_products(_context: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


_selective_contexts = partial(create_selective_checkpoint_contexts, _keep_products)
