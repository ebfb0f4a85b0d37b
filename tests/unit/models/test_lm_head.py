"""The fused head and loss against the plain computation."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from models.batch import IGNORE_INDEX
from models.layers.lm_head import linear_cross_entropy

TOKENS, WIDTH, VOCAB = 23, 12, 50


def _inputs(dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[::4] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def _plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORE_INDEX, reduction="none")


@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, 100, None])
def test_loss_nats_hits_and_gradients_equal_the_plain_ones(chunk_tokens) -> None:
    hidden, weight, labels = _inputs()
    nats = _plain(hidden, weight, labels)
    expected = torch.autograd.grad((nats.sum() * 0.25), (hidden, weight))
    loss, got, hits = linear_cross_entropy(
        hidden, weight, labels, loss_scale=torch.tensor(0.25), greedy=True, chunk_tokens=chunk_tokens
    )
    gradients = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(got, nats.detach(), atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(loss, nats.sum() * 0.25, atol=1e-13, rtol=1e-13)
    for ours, plain in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-13, rtol=1e-12)
    assert torch.equal(hits, (hidden @ weight.T).argmax(-1) == labels)
    assert not got.requires_grad


@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_accumulating_micro_batches_changes_neither_loss_nor_gradient(chunk_tokens) -> None:
    """Field case R14: for each loss, gradient norm of 4 micro-batches / that of 1 is 1."""
    hidden, weight, labels = _inputs()
    scale = torch.tensor(1 / int((labels != IGNORE_INDEX).sum()), dtype=torch.float64)
    norms = []
    for parts in (1, 4):
        total = torch.zeros_like(weight)
        for part in torch.arange(TOKENS).chunk(parts):
            loss, _, _ = linear_cross_entropy(
                hidden[part], weight, labels[part], loss_scale=scale, chunk_tokens=chunk_tokens
            )
            total += torch.autograd.grad(loss, weight)[0]
        norms.append(total.norm().item())
    plain = torch.autograd.grad(_plain(hidden, weight, labels).sum() * scale, weight)[0].norm().item()
    assert norms == pytest.approx([plain, plain], rel=1e-13)


def test_gradcheck_in_float64() -> None:
    hidden, weight, labels = _inputs()
    scale = torch.tensor(0.5, dtype=torch.float64)

    def loss(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(h, w, labels, loss_scale=scale, chunk_tokens=9)[0]

    assert torch.autograd.gradcheck(loss, (hidden, weight))


def test_gradient_arrives_scaled_and_only_where_it_is_wanted() -> None:
    hidden, weight, labels = _inputs()
    loss, _, _ = linear_cross_entropy(hidden, weight.detach(), labels)
    once = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(3 * loss, hidden)[0], 3 * once, atol=0, rtol=1e-14)
    with torch.no_grad():
        loss, nats, _ = linear_cross_entropy(hidden, weight, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(nats, _plain(hidden, weight, labels).detach(), atol=1e-13, rtol=1e-13)


def test_bfloat16_logits_are_not_rounded() -> None:
    """Field case R87: bf16 operands, true loss 36.1: returned in fp32, error below 1e-3 (bf16's grid is 0.25)."""
    hidden = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    weight = torch.tensor([[0.0, 0.0], [36.0, 0.1]], dtype=torch.bfloat16)
    truth = F.cross_entropy(hidden.double() @ weight.double().T, torch.tensor([0])).item()
    assert 36.0 < truth < 36.2
    loss, nats, _ = linear_cross_entropy(hidden, weight, torch.tensor([0]))
    assert nats.dtype == loss.dtype == torch.float32
    assert abs(nats.item() - truth) < 1e-3
    assert abs(loss.item() - truth) < 1e-3


def test_bfloat16_weight_gradient_accumulates_in_float32() -> None:
    """Summed over chunks in bf16, many small terms would be lost against a large one."""
    tokens = 600
    hidden = torch.full((tokens, 1), 1.0, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()
    labels = torch.zeros(tokens, dtype=torch.int64)
    loss, _, _ = linear_cross_entropy(hidden, weight, labels, chunk_tokens=1)
    loss.backward()
    assert weight.grad.flatten().tolist() == [-300.0, 300.0]  # bf16 sums of 0.5 stop at 128


class _LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_logits_never_exist_at_once(dtype) -> None:
    """Field case R93: 8192 tokens, 128k ids: nothing larger than a quarter of the logits in fp32 is ever allocated."""
    with FakeTensorMode(), _LargestTensor() as largest:
        hidden = torch.empty(8192, 64, dtype=dtype, requires_grad=True)
        weight = torch.empty(128_256, 64, dtype=dtype, requires_grad=True)
        labels = torch.zeros(8192, dtype=torch.int64)
        loss, _, _ = linear_cross_entropy(hidden, weight, labels, greedy=True)
        loss.backward()
    assert hidden.grad.shape == hidden.shape and weight.grad.shape == weight.shape
    assert largest.bytes <= 8192 * 128_256 * 4 / 4
