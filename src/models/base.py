"""The interface that training code knows of a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from models.batch import Batch
from models.counts import MatrixShapes, ParameterCounts, count_parameters
from models.errors import ArchError
from models.layers.block import BlockRunner
from models.layers.context_parallel.base import ContextParallel, CpStyle
from models.layers.dropout import DropoutKeys
from models.layers.norm import RMSNorm
from models.layers.offload import ActivationOffload


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """What `CausalLM.forward` returns."""

    loss: Tensor
    """() sum of `nats` times the loss scale; call backward() on it."""

    nats: Tensor
    """(rows, seq_len) fp32 (fp64 in float64 runs): -ln p(label); 0 where the label is IGNORE_INDEX, or the position
    another rank's. Detached."""

    greedy_hits: Tensor | None
    """(rows, seq_len) bool: the most likely token is the label; False where there is none or the position is another
    rank's. None unless asked for."""


# FSDP finds the loss in the root's output by flattening it, and hangs its backward hook there.
torch.export.register_dataclass(LossOutput)


class InitRule(Protocol):
    """A family's own rule for one parameter's first values."""

    def __call__(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """`count` float32 values of consecutive elements of the parameter (row-major)."""
        ...


def ones(generator: np.random.Generator, count: int) -> np.ndarray:
    """The rule of norm gains."""
    return np.ones(count, np.float32)


class CausalLM(nn.Module):
    """A decoder with its loss. Families derive from it; training code uses nothing else.

    The head owns the loss because FSDP's hooks gather its weight, and because the logits of a whole batch must never
    exist at once. Embedding, final norm and head belong to the root's FSDP unit: a tied head reads the embedding.
    """

    impl: Literal["custom", "hf"] = "custom"
    """Whose network it is: ours, or that of transformers (models.hf)."""

    wrapped_names: Mapping[str, str] = MappingProxyType({})
    """Names of parameters where a wrapper around their module shows in them, to the canonical ones."""

    dropout: DropoutKeys | None = None
    """Keys to draw before every training forward pass, in a model with dropout."""

    def forward(self, batch: Batch, loss_scale: Tensor | None = None, greedy: bool = False) -> LossOutput:
        """Loss of one micro-batch: of this rank's share of it, where rows are shared.

        Args:
            loss_scale: () on the batch's device, normally 1 / loss tokens of the global batch; None is 1.
            greedy: also say where the most likely token is the label.

        Raises:
            ValueError: the attention chosen cannot run on the batch's device, dtype or form.
        """
        raise NotImplementedError

    def logits(self, batch: Batch) -> Tensor:
        """(rows, seq_len, vocab_size) logits in fp32 (fp64 in float64 runs), all at once: for generation and tests. 0,
        and without gradients, where rows are shared and the position is another rank's."""
        raise NotImplementedError

    def check_context_parallel(self, style: CpStyle, size: int) -> None:
        """Check that ranks can share rows of this model.

        Args:
            style: "ulysses" or "ring".
            size: ranks that share a row, above 1.

        Raises:
            ArchError: they cannot.
        """
        raise ArchError("model_type", "this network sees whole rows; only those implemented here can share them")

    def share_rows(self, parallel: ContextParallel) -> None:
        """Compute only a share of the positions of every row from now on, the others being other ranks'.

        Args:
            parallel: this rank's part; of a style and size that `check_context_parallel` has nothing against.
        """
        raise NotImplementedError

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The transformer blocks: units of compile, activation checkpointing and sharding."""
        raise NotImplementedError

    @property
    def block_runners(self) -> list[BlockRunner]:
        """What runs each block: its attribute `runner`."""
        return [cast(BlockRunner, block.runner) for block in self.blocks]

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by the names that files and logs have for them, without a trace of wrappers."""
        return {self.wrapped_names.get(name, name): parameter for name, parameter in self.named_parameters()}

    @property
    def vocabulary_matrices(self) -> Sequence[Tensor]:
        """The embedding parameters by the rule of models.counts: input table, and output head unless tied."""
        raise NotImplementedError

    @property
    def vocabulary_names(self) -> list[str]:
        """Canonical names of the vocabulary matrices."""
        ids = {id(matrix) for matrix in self.vocabulary_matrices}
        return [name for name, parameter in self.canonical_parameters().items() if id(parameter) in ids]

    @property
    def matrix_shapes(self) -> MatrixShapes:
        """What decides the FLOPs."""
        raise NotImplementedError

    @property
    def tied_names(self) -> dict[str, str]:
        """Names under which files may hold a tied parameter once more, to its canonical name; none when untied."""
        return {}

    def init_rules(self) -> dict[str, InitRule]:
        """Parameters (by canonical name) with a rule of their own: norm gains are 1. The others: see models.init."""
        return {
            f"{name}.weight" if name else "weight": ones
            for name, module in self.named_modules()
            if isinstance(module, RMSNorm)
        }

    def apply_activation_checkpointing(self, mode: Literal["full", "selective"], freq: int) -> None:
        """Recompute activations of every freq-th block in the backward pass. Values and parameter names stay the same.

        Args:
            mode: `full` keeps a block's input only, `selective` also the results of matrix products and attention.
            freq: 1 is every block.
        """
        for runner in self.block_runners[::freq]:
            runner.recompute_activations(mode)

    def offload_activations(
        self, *, max_inflight: int, device: torch.device, allocate: Callable[[int], Tensor]
    ) -> None:
        """Keep the blocks' activations in host memory until the backward pass; see models.layers.offload."""
        runners = self.block_runners
        offload = ActivationOffload(len(runners), max_inflight=max_inflight, device=device, allocate=allocate)
        for index, runner in enumerate(runners):
            runner.offload_activations(offload, index)

    def compile_blocks(self, mode: str, fullgraph: bool) -> None:
        """Compile each block with torch.compile; look-alike blocks share a graph. Parameter names stay the same.

        One graph per shape of (rows, seq_len) and grad mode is expected: training, and each validation length. More
        shapes than `torch._dynamo.config.recompile_limit`, raised here, are an error instead of a silent return to
        eager speed.
        """
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        for runner in self.block_runners:
            runner.compile(mode, fullgraph)

    @property
    def num_inactive_params(self) -> int:
        """Parameters that a token does not pass through: 0 in a dense model."""
        return 0

    def count_parameters(self) -> ParameterCounts:
        """Numbers of parameters; the rule of what an embedding is stands in models.counts."""
        return count_parameters(self)

    @property
    def num_frozen_products(self) -> int:
        """Of the weights that a token is multiplied with, those that are frozen."""
        matrices = [p for block in self.blocks for p in block.parameters() if p.dim() == 2]
        return sum(p.numel() for p in [*matrices, self.vocabulary_matrices[-1]] if not p.requires_grad)

    def flops(self, num_tokens: int, attention_pairs: int) -> int:
        """FLOPs of the matrix products, forward and backward: output head in, embedding look-up out; attention over
        the pairs really attended. See MatrixShapes.flops."""
        return self.matrix_shapes.flops(num_tokens, attention_pairs, frozen_params=self.num_frozen_products)

    def flops_6dn(self, num_tokens: int) -> int:
        """6 D N, the usual estimate: N is the active parameters, output head in (tied or not), input table out. Frozen
        matrices count 4: they get no gradient of their own."""
        active = self.count_parameters().num_active_non_embedding_params
        return (6 * (active + self.matrix_shapes.head_params) - 2 * self.num_frozen_products) * num_tokens
