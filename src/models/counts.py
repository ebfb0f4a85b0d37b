"""Parameter counts and FLOPs: one rule of what an embedding is, one count of operations.

An embedding is a matrix with one row per id of the vocabulary: the input table and, when it is not tied to it, the
output head. Tied, the shared matrix counts once. So `num_non_embedding_params` does not depend on tying; model cards
count the same way. FLOPs follow the computation instead: the head's product counts, tied or not, the look-up does not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Numbers of scalar parameters."""

    num_params: int
    """All of them; a tied matrix once."""

    num_embedding_params: int
    """Input table and untied output head."""

    num_non_embedding_params: int
    """The rest."""

    num_active_non_embedding_params: int
    """Of the rest, those that one token passes through: all in a dense model, the routed experts' share in MoE."""

    num_trainable_params: int
    """Of all, those that training changes: with adapters (models.lora) these and what is trained whole."""


class Countable(Protocol):
    """What counting needs of a model."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    @property
    def vocabulary_matrices(self) -> Sequence[Tensor]: ...

    @property
    def num_inactive_params(self) -> int: ...


def count_parameters(model: Countable) -> ParameterCounts:
    """Numbers of parameters of the whole model, however it is sharded."""
    total = sum(parameter.numel() for parameter in model.parameters())
    embedding = sum(matrix.numel() for matrix in model.vocabulary_matrices)
    return ParameterCounts(
        num_params=total,
        num_embedding_params=embedding,
        num_non_embedding_params=total - embedding,
        num_active_non_embedding_params=total - embedding - model.num_inactive_params,
        num_trainable_params=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
    )


@dataclass(frozen=True, kw_only=True)
class MatrixShapes:
    """What decides the FLOPs of a model."""

    block_params: int
    """Weights of the blocks' projections that one token is multiplied with."""

    head_params: int
    """Weights of the output head, vocabulary times width."""

    attention_width: int
    """Sum over the layers with attention of query heads times head dimension."""

    def flops(self, num_tokens: int, attention_pairs: int, *, frozen_params: int = 0) -> int:
        """FLOPs of the matrix products of one forward and backward pass, recomputation left out.

        A product with n weights takes 2 n per token forward and 4 n backward: 2 n for the gradient of its input, 2 n
        for that of the weights, which frozen ones do not have. Attention takes, per query-key pair and unit of
        attention width, 4 forward (scores, and the weighted sum of values) and twice that backward.

        Args:
            num_tokens: positions computed, padding included.
            attention_pairs: query-key pairs really attended (Batch.attention_pairs).
            frozen_params: of the weights of blocks and head, those without gradient.
        """
        products = (6 * (self.block_params + self.head_params) - 2 * frozen_params) * num_tokens
        return products + 12 * self.attention_width * attention_pairs
