"""Our attention inside documents, as an attention function of transformers' models.

transformers' models look their attention up by name (`AttentionInterface`) and hand keyword arguments of the forward
pass down to it. So the batch's document borders travel as one of them, `documents`, and no mask is ever built: a name
that transformers' mask interface does not know gets none. (A mask function that returns None would not do: before it is
called, transformers looks at the positions of the batch, which makes the host wait for the GPU.)
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from models.layers.attention import DocumentContext, attend

ATTENTION_NAME = "inside_documents"

# Keyword arguments that some models hand down and that change nothing in an attention without cache and mask.
_WITHOUT_EFFECT = (
    *("position_ids", "position_embeddings", "cache_position", "layer_idx", "layer_type"),
    *("return_dict", "output_hidden_states"),
)


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What one attention layer asks for."""

    module: nn.Module
    num_heads: int
    head_dim: int
    sliding_window: int | None


@dataclass
class Trace:
    """Given as `documents`, it notes the calls instead of attending; shapes only, so it works on the meta device."""

    calls: list[AttentionCall] = field(default_factory=list)


def register_attention() -> None:
    """Make the function known to transformers. May be called again."""
    AttentionInterface.register(ATTENTION_NAME, attend_in_documents)


def attend_in_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: DocumentContext | Trace | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function.

    Args:
        module: the attention layer.
        query: (rows, heads, seq_len, head_dim)
        key: (rows, kv heads, seq_len, head_dim)
        value: likewise.
        attention_mask: None.
        documents: of the batch.
        dropout: 0.
        scaling: factor of the scores; None is head_dim ** -0.5.
        is_causal: not False.
        sliding_window: keys that a query sees, its own included; not less than seq_len.
        others: nothing that would change the result.

    Returns:
        (rows, seq_len, heads, head_dim), and None for the weights.

    Raises:
        ValueError: the layer asks for what this does not compute.
    """
    if documents is None:
        raise ValueError("its attention layers are not handed the document borders")
    if attention_mask is not None:
        raise ValueError("it builds an attention mask of its own")
    if dropout:
        raise ValueError(f"attention dropout ({dropout:g}) is not implemented")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise ValueError("its attention is not causal")
    for name, argument in others.items():
        if argument is not None and argument is not False and name not in _WITHOUT_EFFECT:
            raise ValueError(f"its attention asks for {name}, which is not implemented")
    if not query.size(-1) == key.size(-1) == value.size(-1) or query.size(1) % key.size(1):
        raise ValueError("the heads of queries, keys and values do not fit each other")
    if query.size(2) != key.size(2):
        raise ValueError("its queries meet keys that are not those of the row")
    if isinstance(documents, Trace):
        call = AttentionCall(
            module=module, num_heads=query.size(1), head_dim=query.size(3), sliding_window=sliding_window
        )
        documents.calls.append(call)
        return torch.empty_like(query).transpose(1, 2), None
    if sliding_window is not None and sliding_window < query.size(2):
        raise ValueError(f"its sliding window ({sliding_window}) is shorter than a row of {query.size(2)}")
    heads = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return attend(*heads, documents, scale=scaling), None
