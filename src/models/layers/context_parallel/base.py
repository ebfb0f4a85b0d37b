"""What a model knows of the ranks that share its rows.

All of them are given the same whole rows. The model takes this rank's share of the positions before its first layer,
and everything that treats positions one by one (norms, projections, feed-forward, head) needs to know nothing more.
What mixes positions (attention; a recurrent layer) goes through the object: attention through `attend`, any layer whose
heads are independent through `to_heads` and `to_rows`. What the model gives back for positions (nats, greedy hits) has
the shape of the whole rows again, with 0 where a position is another rank's; so a sum over these ranks is the sum over
the rows.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from models.layers.attention import DocumentContext

CpStyle = Literal["ulysses", "ring"]


class ContextParallel(ABC):
    """This rank's part in the ranks that share rows."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @abstractmethod
    def share(self, values: Tensor) -> Tensor:
        """(rows, seq_len, ...) of whole rows -> (rows, seq_len / size, ...) of this rank's positions."""

    @abstractmethod
    def place(self, values: Tensor) -> Tensor:
        """(rows, seq_len / size, ...) of this rank's positions -> (rows, seq_len, ...), 0 elsewhere. Not
        differentiable."""

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, context: "DocumentContext", scale: float | None
    ) -> Tensor:
        """Causal attention inside the documents of the whole rows; see models.layers.attention.attend.

        Args:
            query: (rows, seq_len / size, heads, head_dim) of this rank's positions.
            key: (rows, seq_len / size, kv heads, head_dim), likewise.
            value: likewise.
            context: of the whole rows.
            scale: factor of the scores; None is head_dim ** -0.5.

        Returns:
            (rows, seq_len / size, heads, head_dim)
        """
