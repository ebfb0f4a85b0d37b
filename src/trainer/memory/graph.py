"""Memory of a compiled graph, by when each of its tensors is made and last read.

torch.compile fuses: a tensor that is only read inside the same kernels is never in memory. Taken here: matrix products
and other operations with kernels of their own read and write memory, everything else is fused into what reads it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, fx

_OWN_KERNELS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "embedding", "embedding_dense_backward", "sort")


def num_bytes(value: object) -> int:
    """Bytes of a tensor, of all tensors in a tuple, or 0."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(num_bytes(part) for part in value) if isinstance(value, (tuple, list)) else 0


def extra_bytes(graph: fx.Graph) -> int:
    """The most that a run of `graph` needs beyond its inputs, each of which is freed after its last use."""
    nodes = list(graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    last_use = _last_uses(nodes, place)
    dying: dict[int, list[fx.Node]] = {}
    for node, index in last_use.items():
        dying.setdefault(index, []).append(node)
    extra = most = 0
    for index, node in enumerate(nodes):
        freed = sum(_size(other) for other in dying.get(index, []))
        if node.op != "placeholder" and node in last_use:
            made = _size(node)
            if not _has_own_kernel(node):  # written over an input that is not read any more
                made, freed = max(made - freed, 0), max(freed - made, 0)
            extra += made
            most = max(most, extra)
        extra -= freed
    return most


def _last_uses(nodes: list[fx.Node], place: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Of each tensor in memory, the place of the node after which it is gone."""
    memo: dict[fx.Node, int] = {}
    in_memory = [node for node in nodes if _is_in_memory(node)]
    kept = set(in_memory)

    def last(node: fx.Node) -> int:
        """The last place where the value of `node` is read, through nodes that are fused into their readers."""
        if node not in memo:
            memo[node] = max(
                (
                    place[user] if user in kept or user.op == "output" else max(place[user], last(user))
                    for user in node.users
                ),
                default=place[node],
            )
        return memo[node]

    for node in reversed(nodes):  # from the end, so that no chain is followed twice
        last(node)
    return {node: memo[node] for node in in_memory}


def _is_in_memory(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return True
    if node.op != "call_function" or _is_view(node):
        return False
    return _has_own_kernel(node) or any(user.op == "output" for user in node.users) or _is_read_by_kernel(node.users)


def _is_read_by_kernel(users: Iterable[fx.Node]) -> bool:
    return any(_has_own_kernel(user) or (_is_view(user) and _is_read_by_kernel(user.users)) for user in users)


def _has_own_kernel(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace not in ("aten", "prims"):
        return True
    name = target._schema.name.split("::")[-1]
    return name in _OWN_KERNELS or "attention" in name


def _is_view(node: fx.Node) -> bool:
    """Parts of a tuple, and other shapes of the same memory."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return any(result.alias_info is not None for result in target._schema.returns)
    return True


def _size(node: fx.Node) -> int:
    return num_bytes(node.meta.get("val"))
