"""Ring attention on a GPU, its ranks being threads of one process: the flash attention kernels, their parts joined."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Rows = Sequence[Sequence[int]]
RingInThreads = Callable[..., list[Tensor]]
NAMES = ("output", "by query", "by key", "by value")
PACKED = [[7, 500, 1, 260, 256], [1000, 24], [1024], [1] * 100 + [900] + [1] * 24, [511, 1, 512]]
WHOLE = [[1024], [1024]]


def _inputs(rows: Rows, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the gradient by the output."""
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (len(rows), sum(rows[0]))
    return [
        torch.randn(*shape, number, head_dim, generator=generator, device="cuda", dtype=torch.float32).to(dtype)
        for number in (heads, kv_heads, kv_heads, heads)
    ]


def _one_rank(inputs: Sequence[Tensor], rows: Rows, scale: float) -> list[Tensor]:
    """Output and gradients of SDPA, document by document."""
    query, key, value, grad = inputs
    leaves = [values.clone().requires_grad_() for values in (query, key, value)]
    outs = []
    for row, lengths in enumerate(rows):
        documents = zip(*(leaf[row].split(list(lengths)) for leaf in leaves), strict=True)
        for parts in documents:
            q, k, v = (part.transpose(0, 1)[None] for part in parts)
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=q.size(1) != k.size(1)
            )
            outs.append(out[0].transpose(0, 1))
    out = torch.cat(outs).view(query.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    """Norm-wise."""
    return {
        name: ((ours.double() - wide).norm() / wide.norm()).item()
        for name, ours, wide in zip(NAMES, found, exact, strict=True)
    }


def _check_bf16(
    rows: Rows, heads: int, kv_heads: int, head_dim: int, size: int, ring_in_threads: RingInThreads
) -> None:
    """As near to float64 as attention of one rank in bfloat16.

    Joining adds one rounding of each part's output, weights adding up to 1, to the one rounding that one rank has, and
    one of each rank's part of a gradient; all are independent and of the same size at most, so norms grow by no more
    than a factor of 2.
    """
    inputs = _inputs(rows, heads, kv_heads, head_dim, torch.bfloat16)
    scale = head_dim**-0.5
    exact = _one_rank([values.double() for values in inputs], rows, scale)
    found = ring_in_threads(*inputs, rows, size=size, scale=scale)
    assert {values.dtype for values in found} == {torch.bfloat16}
    ours = _errors(found, exact)
    theirs = _errors(_one_rank(inputs, rows, scale), exact)
    print(f"ring {ours}, one rank {theirs}")
    assert {name: error for name, error in ours.items() if not error < 2 * theirs[name]} == {}
    assert max(ours.values()) < 0.01


@contextmanager
def _no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 128), (3, 1, 8)])
@pytest.mark.parametrize("rows", [PACKED, WHOLE], ids=["packed", "whole rows"])
def test_bf16_kernels(rows: Rows, heads, kv_heads, head_dim, size, ring_in_threads: RingInThreads) -> None:
    """The kernel that SDPA picks for whole rows, flash attention for documents."""
    _check_bf16(rows, heads, kv_heads, head_dim, size, ring_in_threads)


def test_bf16_flash_attention_of_whole_rows(ring_in_threads: RingInThreads) -> None:
    """Where SDPA may not pick cuDNN."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        _check_bf16(WHOLE, 8, 2, 64, 4, ring_in_threads)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 3e-6), (torch.float64, 1e-14)])
def test_plain_form(dtype, limit, ring_in_threads: RingInThreads) -> None:
    """What the kernels do not take goes through matrix products, fp32 without TF32."""
    inputs = _inputs(PACKED, 4, 2, 24, dtype)
    exact = _one_rank([values.double() for values in inputs], PACKED, 0.3)
    assert max(_errors(ring_in_threads(*inputs, PACKED, size=4, scale=0.3), exact).values()) < limit


def test_odd_head_dim_in_bf16(ring_in_threads: RingInThreads) -> None:
    """The kernels take multiples of 8 only."""
    inputs = _inputs(PACKED, 4, 2, 12, torch.bfloat16)
    exact = _one_rank([values.double() for values in inputs], PACKED, 0.3)
    assert max(_errors(ring_in_threads(*inputs, PACKED, size=2, scale=0.3), exact).values()) < 0.01


@pytest.mark.parametrize("rows", [PACKED, WHOLE], ids=["packed", "whole rows"])
def test_no_host_sync(rows: Rows, ring_in_threads: RingInThreads) -> None:
    inputs = _inputs(rows, 4, 2, 64, torch.bfloat16)
    expected = ring_in_threads(*inputs, rows, size=2, scale=0.1)
    with _no_sync():
        found = ring_in_threads(*inputs, rows, size=2, scale=0.1)
    assert torch.equal(found[0], expected[0])


def test_repeats_bit_for_bit(ring_in_threads: RingInThreads) -> None:
    """With deterministic algorithms asked for."""
    inputs = _inputs(PACKED, 4, 2, 64, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (ring_in_threads(*inputs, PACKED, size=4, scale=0.1) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [name for name, *pair in zip(NAMES, first, second, strict=True) if not torch.equal(*pair)] == []


@pytest.mark.parametrize("lengths", [[65536], [1000] * 65 + [536]], ids=["one document", "packed"])
def test_memory_grows_with_length_only(lengths: list[int], ring_in_threads: RingInThreads) -> None:
    """65,536 positions: one head's scores or mask alone would be 4 GiB even in bytes."""
    inputs = _inputs([lengths], 4, 2, 64, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = ring_in_threads(*inputs, [lengths], size=2, scale=0.125)
    assert torch.stack([values.isfinite().all() for values in found]).all()
    size = sum(values.numel() * values.element_size() for values in inputs)
    assert torch.cuda.max_memory_allocated() - before < 12 * size
