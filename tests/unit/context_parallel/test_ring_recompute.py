"""Recomputation and ring attention: what is attended again is sent again, so it is kept where results are kept."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.layers.block import BlockRunner, RecomputeMode
from models.layers.context_parallel import ring
from models.layers.context_parallel.parts import Documents, Heads, Kernel
from models.layers.context_parallel.ring_passes import Link, Share, ring_forward
from models.layers.context_parallel.ring_plan import ring_plan


class _NoLink:
    def swap(self, sent: Tensor, target: int, received: Tensor, source: int) -> Any:
        assert sent.numel() == received.numel() == 0, "no document lies in several chunks"
        return self

    def wait(self) -> Tensor:
        return torch.empty((2, 0, 2, 4), dtype=torch.float64)


@pytest.mark.parametrize(("mode", "forwards"), [(None, 1), ("selective", 1), ("full", 2)])
def test_times_attended(mode: RecomputeMode | None, forwards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    borders = torch.tensor([0, 4, 8, 12, 16], dtype=torch.int32)
    link: Link = _NoLink()
    calls = []

    def share(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Share:
        plan = ring_plan(borders.numpy(), seq_len=16, rank=0, size=2)
        heads = Heads(query=query, key=key, value=value, scale=0.5, kernel=Kernel.PLAIN)
        return Share(heads=heads, documents=Documents(lengths=plan.documents, cu_seqlens=borders), plan=plan, link=link)

    def counted(of: Share) -> Any:
        calls.append(of)
        return ring_forward(of)

    monkeypatch.setattr(ring, "_share", share)
    monkeypatch.setattr(ring, "ring_forward", counted)
    query, key, value = (torch.randn(1, 8, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def body(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse = ring.ring_attention(query.sin(), key, value, borders, borders, 0.5, "none")
        assert not lse.requires_grad
        return out.cos()

    runner = BlockRunner(body)
    if mode is not None:
        runner.recompute_activations(mode)
    out = runner(query, key, value)
    gradients = torch.autograd.grad(out.sum(), (query, key, value))
    assert len(calls) == forwards
    # The same in one piece: two documents of four positions.
    q, k, v = (values.unflatten(1, (2, 4))[0].transpose(1, 2) for values in (query.sin(), key, value))
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5).cos()
    for found, exact in zip(gradients, torch.autograd.grad(whole.sum(), (query, key, value)), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("dtype", "sums"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_shapes_that_compiled_graphs_are_told(dtype: torch.dtype, sums: torch.dtype) -> None:
    query, key = (torch.empty(3, 8, heads, 4, dtype=dtype, device="meta").requires_grad_() for heads in (6, 2))
    borders = torch.empty(5, dtype=torch.int32, device="meta")
    out, lse = ring.ring_attention(query, key, key, borders, borders, 0.5, "none")
    assert (out.shape, out.dtype) == (query.shape, dtype)
    assert (lse.shape, lse.dtype) == ((3, 6, 8), sums)
    gradients = torch.autograd.grad(out, (query, key), torch.empty_like(out))
    assert [(found.shape, found.dtype) for found in gradients] == [(query.shape, dtype), (key.shape, dtype)]
