"""DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): attention over whole rows for a share of the heads.

Queries, keys and values go from a share of the positions to a share of the heads, and the result goes back. So
attention itself is that of one rank, in all its forms. Where there are fewer key-value heads than ranks, several ranks
attend with the same one.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from models.layers.attention import DocumentContext, attend
from models.layers.context_parallel.base import ContextParallel


def heads_fit(num_heads: int, num_kv_heads: int, ranks: int) -> bool:
    """Whether every rank gets whole query heads, all of them with the same number of whole key-value heads."""
    return num_heads % ranks == 0 and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0)


class Ulysses(ContextParallel):
    """Shares are consecutive positions; attention exchanges them for heads."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """
        Args:
            group: the ranks that share rows.
        """
        super().__init__(group, range(dist.get_world_size(group)))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: DocumentContext) -> Tensor:
        """See ContextParallel.attend. The numbers of heads must fit; see `heads_fit`."""
        copies = max(1, self.size // key.size(2))
        if copies > 1:
            key, value = (heads.repeat_interleave(copies, 2) for heads in (key, value))
        # One exchange for all three: rank r gets its heads of each, side by side.
        by_rank = [heads.unflatten(2, (self.size, -1)) for heads in (query, key, value)]
        widths = [heads.size(3) for heads in by_rank]
        query, key, value = self.to_heads(torch.cat(by_rank, dim=3).flatten(2, 3)).split(widths, dim=2)
        return self.to_rows(attend(query, key, value, context))
