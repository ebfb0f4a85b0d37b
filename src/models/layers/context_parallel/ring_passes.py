"""The two passes of ring attention on one rank: keys and values come in turn by turn, the next while those of the last
turn are computed with.

A rank gets only the keys that its queries meet, straight from the rank that has them: with short documents next to
nothing travels. In the backward pass the keys come once more, and their gradients go straight back to their owner,
which adds them up; so nothing is rounded on the way.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor

from models.layers.context_parallel.partial_attention import (
    attend_documents,
    attend_rectangle,
    document_gradients,
    rectangle_gradients,
)
from models.layers.context_parallel.parts import Attended, Documents, Heads, join_, sum_dtype
from models.layers.context_parallel.ring_plan import RingPlan, RingStep, Span


class Arrival(Protocol):
    """A tensor that is on its way."""

    def wait(self) -> Tensor:
        """It, to be used from now on, as may be again what was sent in exchange. A host with a GPU does not wait."""
        ...


class Link(Protocol):
    """How tensors get from rank to rank."""

    def swap(self, sent: Tensor, target: int, received: Tensor, source: int) -> Arrival:
        """Begin to send a tensor and to fill another. Those without elements do not travel.

        Args:
            sent: contiguous.
            target: rank of the group that it goes to.
            received: contiguous, of the shape that `source` sends.
            source: rank of the group that it comes from.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a rank has of a batch, what it does with it, and how it gets what others have."""

    heads: Heads
    """Of this rank's positions: (rows, seq_len / size, ...)."""

    documents: Documents
    """The parts of documents in the share."""

    plan: RingPlan
    link: Link


def ring_forward(share: Share) -> Attended:
    """Attention of this rank's queries over all keys that they may see.

    Returns:
        `out` in the dtype of the queries, `lse` in `sum_dtype`.
    """
    heads, steps = share.heads, share.plan.steps
    coming = _swap_keys(share, steps[0])
    own = attend_documents(heads, share.documents)
    out, lse = own.out.to(sum_dtype(own.out.dtype)), own.lse.contiguous()
    for step, following in zip_longest(steps, steps[1:]):
        parcel = coming.wait()
        if following is not None:
            coming = _swap_keys(share, following)
        for pair, (key, value) in zip(step.received, _spans(parcel, step.received_keys), strict=True):
            rows, positions = pair.queries.rows, pair.queries.positions
            part = attend_rectangle(replace(heads, query=heads.query[rows, positions], key=key, value=value))
            join_(out[rows, positions], lse[rows, :, positions], part)
    return Attended(out=out.to(heads.query.dtype), lse=lse)


def ring_backward(share: Share, grad: Tensor, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by this rank's query, key and value.

    Args:
        share: as in the forward pass.
        grad: (rows, seq_len / size, heads, head_dim) by `attended.out`.
        attended: what the forward pass gave.
    """
    heads, steps = share.heads, share.plan.steps
    coming = _swap_keys(share, steps[0])
    own = document_gradients(heads, grad, attended, share.documents)
    by_query, by_key, by_value = (gradient.to(sum_dtype(gradient.dtype)) for gradient in own)
    returning: tuple[RingStep, Arrival] | None = None
    for step, following in zip_longest(steps, steps[1:]):
        parcel = coming.wait()
        if following is not None:
            coming = _swap_keys(share, following)
        gradients = torch.empty_like(parcel)
        for pair, (key, value), (to_key, to_value) in zip(
            step.received, _spans(parcel, step.received_keys), _spans(gradients, step.received_keys), strict=True
        ):
            rows, positions = pair.queries.rows, pair.queries.positions
            query_part, key_part, value_part = rectangle_gradients(
                replace(heads, query=heads.query[rows, positions], key=key, value=value),
                grad[rows, positions],
                Attended(out=attended.out[rows, positions], lse=attended.lse[rows, :, positions]),
            )
            by_query[rows, positions] += query_part
            to_key.copy_(key_part)
            to_value.copy_(value_part)
        if returning is not None:
            _add(by_key, by_value, *returning)
        mine = _empty(heads.key, step.sent_keys)
        returning = step, share.link.swap(gradients, step.source, mine, step.target)
    if returning is not None:
        _add(by_key, by_value, *returning)
    return by_query.to(heads.query.dtype), by_key.to(heads.key.dtype), by_value.to(heads.value.dtype)


def _swap_keys(share: Share, step: RingStep) -> Arrival:
    key, value = share.heads.key, share.heads.value
    sent = [part[span.rows, span.positions].flatten(0, 1) for part in (key, value) for span in step.sent_keys]
    parcel = torch.cat(sent).unflatten(0, (2, -1)) if sent else _empty(key, ())
    return share.link.swap(parcel, step.target, _empty(key, step.received_keys), step.source)


def _empty(key: Tensor, spans: Iterable[Span]) -> Tensor:
    """(2, tokens, kv heads, head_dim) for keys and values of spans."""
    return key.new_empty((2, sum(span.num_tokens for span in spans), *key.shape[2:]))


def _spans(parcel: Tensor, spans: Sequence[Span]) -> Iterator[tuple[Tensor, Tensor]]:
    """The keys and the values in a parcel, (span's rows, span's positions, kv heads, head_dim) for each span."""
    for span, part in zip(spans, parcel.split([span.num_tokens for span in spans], 1), strict=True):
        key, value = part.unflatten(1, (span.num_rows, -1))
        yield key, value


def _add(by_key: Tensor, by_value: Tensor, step: RingStep, returning: Arrival) -> None:
    """Add the gradients that come back from a step's target."""
    for span, (key_part, value_part) in zip(step.sent_keys, _spans(returning.wait(), step.sent_keys), strict=True):
        by_key[span.rows, span.positions] += key_part
        by_value[span.rows, span.positions] += value_part
