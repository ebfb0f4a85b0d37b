"""The passes of ring attention, its ranks being threads of one process: exact in float64 against one big softmax."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

ROWS = {
    "rows of one document": [[48], [48]],
    "packed": [[7, 5, 1, 11, 24], [3, 45], [48], [1] * 48],
    "documents that end where chunks do": [[12, 12, 24], [24, 24]],
}


def _inputs(rows: list[list[int]], heads: int, kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Query, key, value and the gradient by the output."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(rows), sum(rows[0]))
    return tuple(
        torch.randn(*shape, number, 6, generator=generator, dtype=torch.float64).to(dtype)
        for number in (heads, kv_heads, kv_heads, heads)
    )


def _masked(inputs: Sequence[Tensor], rows: list[list[int]], *, scale: float) -> list[Tensor]:
    """Output, and gradients by query, key and value: one softmax under one mask."""
    query, key, value, grad = inputs
    document = torch.tensor([[number for number, length in enumerate(row) for _ in range(length)] for row in rows])
    seen = (document[:, :, None] == document[:, None, :]) & torch.ones(document.size(1), document.size(1)).tril().bool()
    leaves = [values.clone().requires_grad_() for values in (query, key, value)]
    groups = query.size(2) // key.size(2)
    k, v = (values.repeat_interleave(groups, 2) for values in leaves[1:])
    scores = torch.einsum("rqhd,rkhd->rhqk", leaves[0], k) * scale
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    out = torch.einsum("rhqk,rkhd->rqhd", weights, v)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_exact(rows, heads, kv_heads, size, ring_in_threads):
    inputs = _inputs(rows, heads, kv_heads, torch.float64)
    found = ring_in_threads(*inputs, rows, size=size, scale=0.7)
    expected = _masked(inputs, rows, scale=0.7)
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == torch.float64 and (ours - exact).norm() < 1e-14 * exact.norm()


def test_blocks_of_queries(monkeypatch, ring_in_threads):
    """Blocks bound the scores that exist at once; three queries at a time are no different."""
    monkeypatch.setattr("models.layers.context_parallel.plain_attention._BLOCK_ELEMENTS", 200)
    rows = ROWS["packed"]
    inputs = _inputs(rows, 4, 2, torch.float64)
    for ours, exact in zip(
        ring_in_threads(*inputs, rows, size=2, scale=0.5), _masked(inputs, rows, scale=0.5), strict=True
    ):
        assert (ours - exact).norm() < 1e-14 * exact.norm()


def test_scores_far_from_zero(ring_in_threads):
    """Parts whose scores differ by thousands: nothing overflows, and the lesser part is nothing."""
    rows = [[16]]
    inputs = _inputs(rows, 2, 2, torch.float64)
    inputs[1][:, ::2] *= 1e4
    for ours, exact in zip(
        ring_in_threads(*inputs, rows, size=2, scale=1.0), _masked(inputs, rows, scale=1.0), strict=True
    ):
        assert ours.isfinite().all() and (ours - exact).norm() < 1e-11 * exact.norm()


def test_low_precision_is_added_up_in_fp32(ring_in_threads):
    """bfloat16 in and out; between them only each rank's gradient of keys is rounded on its way to the owner. Of 16
    parts, sums in bfloat16 would be off by more."""
    rows = [[96]]
    inputs = _inputs(rows, 2, 1, torch.bfloat16)
    found = ring_in_threads(*inputs, rows, size=16, scale=0.4)
    exact = _masked([values.double() for values in inputs], rows, scale=0.4)
    assert {values.dtype for values in found} == {torch.bfloat16}
    # One rounding moves a number by 2**-9 of itself at most: of norms, the output's by no more. In the gradients the
    # output's rounding comes in once more, and the keys' are sums of parts rounded each.
    for ours, expected, limit in zip(found, exact, (1, 2, 3, 3), strict=True):
        assert (ours.double() - expected).norm() < limit * 2**-9 * expected.norm()
