"""What a model knows of the ranks that share its rows.

All of them are given the same whole rows. The model takes this rank's share of the positions before its first layer,
and everything that treats positions one by one (norms, projections, feed-forward, head) needs to know nothing more.
What mixes positions (attention; a recurrent layer) goes through the object: attention through `attend`, any layer whose
heads are independent through `to_heads` and `to_rows`. What the model gives back for positions (nats, greedy hits) has
the shape of the whole rows again, with 0 where a position is another rank's; so a sum over these ranks is the sum over
the rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from models.layers.attention import DocumentContext
from models.layers.context_parallel.exchange import exchange

CpStyle = Literal["ulysses", "ring"]


class ContextParallel(ABC):
    """This rank's part in the ranks that share rows.

    A row is cut into chunks of equal length, the same number for every rank. A rank's share is its chunks one after the
    other.
    """

    has_own_attention: ClassVar[bool] = False
    """`attend` does not call `models.layers.attention.attend`, so the forms there do not matter."""

    def __init__(self, group: dist.ProcessGroup, order: Sequence[int]) -> None:
        """
        Args:
            group: the ranks that share rows.
            order: the numbers of the chunks of a row, those of rank 0 first, then those of rank 1, and so on.
        """
        self.group = group
        self.group_name: str = group.group_name
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.order = tuple(order)
        self._places = tuple(self.order.index(chunk) for chunk in range(len(self.order)))

    def share(self, values: Tensor) -> Tensor:
        """(rows, seq_len, ...) of whole rows -> (rows, seq_len / size, ...) of this rank's positions.

        Raises:
            ValueError: the rows cannot be cut into chunks of equal length.
        """
        if values.size(1) % len(self.order):
            raise ValueError(f"rows of {values.size(1)} positions cannot be cut into {len(self.order)} equal chunks")
        return self._cut(values)[self.rank]

    def place(self, values: Tensor) -> Tensor:
        """(rows, seq_len / size, ...) of this rank's positions -> (rows, seq_len, ...), 0 elsewhere. Not
        differentiable."""
        shares = values.new_zeros((self.size, *values.shape))
        shares[self.rank] = values.detach()
        return self._join(shares)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: DocumentContext) -> Tensor:
        """Causal attention inside the documents of the whole rows; see models.layers.attention.attend.

        Args:
            query: (rows, seq_len / size, heads, head_dim) of this rank's positions.
            key: (rows, seq_len / size, kv heads, head_dim), likewise.
            value: likewise.
            context: of the whole rows.

        Returns:
            (rows, seq_len / size, heads, head_dim)
        """

    def to_heads(self, values: Tensor) -> Tensor:
        """From a share of the positions with all heads to all positions with a share of the heads. Differentiable; what
        comes back is in the order of the whole row, for a layer whose heads are independent of each other.

        Args:
            values: (rows, seq_len / size, heads, width) of this rank's positions, heads a multiple of the ranks.

        Returns:
            (rows, seq_len, heads / size, width) of the heads from rank * heads / size on.
        """
        parts = values.unflatten(2, (self.size, -1)).movedim(2, 0)  # (size, rows, seq_len / size, heads / size, width)
        return self._join(exchange(parts, self.group_name))

    def to_rows(self, values: Tensor) -> Tensor:
        """The way back from `to_heads`.

        Args:
            values: (rows, seq_len, heads / size, width) of this rank's heads.

        Returns:
            (rows, seq_len / size, heads, width) of this rank's positions.
        """
        parts = exchange(self._cut(values), self.group_name)  # (size, rows, seq_len / size, heads / size, width)
        return parts.movedim(0, 2).flatten(2, 3)

    def _cut(self, values: Tensor) -> Tensor:
        """(rows, seq_len, ...) -> (size, rows, seq_len / size, ...), a share for each rank."""
        chunks = _permuted(values.unflatten(1, (len(self.order), -1)), self.order)
        return chunks.unflatten(1, (self.size, -1)).movedim(1, 0).flatten(2, 3)

    def _join(self, shares: Tensor) -> Tensor:
        """(size, rows, seq_len / size, ...) -> (rows, seq_len, ...): the way back from `_cut`."""
        chunks = shares.unflatten(2, (len(self.order) // self.size, -1)).movedim(0, 1).flatten(1, 2)
        return _permuted(chunks, self._places).flatten(1, 2)


def _permuted(chunks: Tensor, order: Sequence[int]) -> Tensor:
    """(rows, chunks, ...) in another order. Not by an index tensor: its backward pass adds up in any order on CUDA."""
    if tuple(order) == tuple(range(len(order))):
        return chunks
    return torch.stack([chunks[:, number] for number in order], dim=1)
