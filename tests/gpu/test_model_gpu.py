"""The model on a GPU: documents apart, the CPU's numbers, no host sync, no recompilation, repeats, bounded memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from models.base import CausalLM
from models.batch import Batch
from models.init import init_weights
from models.layers.lm_head import linear_cross_entropy
from models.registry import build_config, build_model
from trainer.data.collate import collate
from trainer.data.row import Rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCAB, ROWS, SEQ_LEN = 1024, 2, 1024
ARCH = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
CUDA = torch.device("cuda")


def _model(device: torch.device, dtype: torch.dtype, attn: str) -> CausalLM:
    """The same bf16-representable weights whatever the dtype, so that only the computation differs."""
    config = build_config(ARCH, tokenizer_length=None, special_ids={})
    with torch.device("meta"):
        model = build_model(config, seq_len=SEQ_LEN, attn=attn, dtype=torch.float32)
    model.to_empty(device=device)
    init_weights(dict(model.named_parameters()), std=0.02, seed=0, rules=model.init_rules())
    return model.to(torch.bfloat16).to(dtype)


def _batch(seed: int, *, full_rows: bool = False, seq_len: int = SEQ_LEN, pin_memory: bool = False) -> Batch:
    generator = np.random.default_rng(seed)
    rows = Rows.empty(ROWS, seq_len)
    tokens = generator.integers(0, VOCAB, (ROWS, seq_len + 1))
    rows.input_ids[:], rows.labels[:] = tokens[:, :-1], tokens[:, 1:]
    for row in range(ROWS):
        lengths = [seq_len] if full_rows else []
        while sum(lengths) < seq_len:
            lengths.append(min(int(2 ** generator.uniform(0, 10)), seq_len - sum(lengths)))
        rows.segment_lengths[row] = np.array(lengths)
    return collate(rows, full_rows=full_rows, pin_memory=pin_memory)


def _gradients(model: CausalLM, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    scale = torch.full((), 1 / batch.num_loss_tokens, dtype=torch.float64, device=batch.input_ids.device)
    loss = model(batch, scale).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.item(), {name: gradient.cpu() for name, gradient in gradients.items() if gradient is not None}


def _relative_errors(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, float]:
    assert ours.keys() == reference.keys()
    return {name: ((ours[name].float() - wide).norm() / wide.norm()).item() for name, wide in reference.items()}


def _relative_error(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Of all tensors as one vector."""
    flat = [torch.cat([tensors[name].float().flatten() for name in reference]) for tensors in (ours, reference)]
    return ((flat[0] - flat[1]).norm() / flat[1].norm()).item()


@contextmanager
def _no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("attn", ["varlen", "sdpa"])
@pytest.mark.parametrize("compiled", [False, True])
def test_editing_one_document_leaves_the_others_untouched(attn, compiled) -> None:
    """Field case R04: the logits of every other document differ by exactly 0."""
    model = _model(CUDA, torch.bfloat16, attn)
    if compiled:
        model.compile_blocks("default", fullgraph=attn == "varlen")
    batch = _batch(0).to(CUDA)
    first = int(batch.segments.host_cu_seqlens[1])
    with torch.no_grad():
        before = model.logits(batch).flatten(0, 1)
        edited = batch.input_ids.flatten()
        edited[:first] = (edited[:first] + 1) % VOCAB
        after = model.logits(batch).flatten(0, 1)
    assert not torch.equal(before[:first], after[:first])
    assert (before[first:] - after[first:]).abs().max().item() == 0.0


@pytest.mark.parametrize("attn", ["varlen", "sdpa"])
@pytest.mark.parametrize("full_rows", [False, True])
def test_bfloat16_loss_and_gradients_are_close_to_the_cpu_in_float32(attn, full_rows) -> None:
    batch = _batch(1, full_rows=full_rows)
    expected_loss, expected = _gradients(_model(torch.device("cpu"), torch.float32, "sdpa"), batch)
    loss, gradients = _gradients(_model(CUDA, torch.bfloat16, attn), batch.to(CUDA))
    assert loss == pytest.approx(expected_loss, rel=1e-3)
    errors = _relative_errors(gradients, expected)
    assert _relative_error(gradients, expected) < 2e-2, errors
    assert max(errors.values()) < 4e-2, errors


@pytest.mark.parametrize("full_rows", [False, True])
def test_float32_loss_and_gradients_equal_the_cpu(full_rows) -> None:
    batch = _batch(2, full_rows=full_rows)
    expected_loss, expected = _gradients(_model(torch.device("cpu"), torch.float32, "sdpa"), batch)
    loss, gradients = _gradients(_model(CUDA, torch.float32, "sdpa"), batch.to(CUDA))
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    errors = _relative_errors(gradients, expected)
    assert _relative_error(gradients, expected) < 1e-5, errors
    assert max(errors.values()) < 3e-5, errors  # against fp64 the CPU's own q and k gradients are off by 5e-6


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_packed_batches_never_recompile_after_warm_up(recompute) -> None:
    """30 packed batches of differing document counts, and a validation length in between."""
    model = _model(CUDA, torch.bfloat16, "varlen")
    if recompute is not None:
        model.apply_activation_checkpointing(recompute, 1)
    model.compile_blocks("default", fullgraph=True)
    validation = _batch(100, seq_len=SEQ_LEN // 2).to(CUDA)
    for seed in range(3):
        _gradients(model, _batch(seed).to(CUDA))
    with torch.no_grad():
        model(validation)
    assert counters["stats"]["unique_graphs"] == 2
    document_counts = set()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3, 33):
            batch = _batch(seed)
            document_counts.add(len(batch.segments.host_cu_seqlens))
            _gradients(model, batch.to(CUDA))
        with torch.no_grad():
            model(validation)
    assert counters["stats"]["unique_graphs"] == 2
    assert len(document_counts) > 5


def test_compiled_gradients_are_close_to_the_plain_ones() -> None:
    batch = _batch(4).to(CUDA)
    _, expected = _gradients(_model(CUDA, torch.bfloat16, "varlen"), batch)
    model = _model(CUDA, torch.bfloat16, "varlen")
    model.apply_activation_checkpointing("selective", 1)
    model.compile_blocks("default", fullgraph=True)
    _, gradients = _gradients(model, batch)
    errors = _relative_errors(gradients, {name: gradient.float() for name, gradient in expected.items()})
    assert max(errors.values()) < 4e-2, errors


def _plain(model: CausalLM) -> None:
    pass


def _recompute(model: CausalLM) -> None:
    model.apply_activation_checkpointing("selective", 1)


def _compile(model: CausalLM) -> None:
    model.compile_blocks("default", fullgraph=False)


@pytest.mark.parametrize("attn", ["varlen", "sdpa"])
@pytest.mark.parametrize("full_rows", [False, True])
@pytest.mark.parametrize("change", [_plain, _recompute, _compile])
def test_forward_and_backward_never_wait_for_the_gpu(attn, full_rows, change: Callable[[CausalLM], None]) -> None:
    model = _model(CUDA, torch.bfloat16, attn)
    change(model)
    _gradients(model, _batch(0, full_rows=full_rows).to(CUDA))
    batch = _batch(1, full_rows=full_rows, pin_memory=True)
    with _no_sync():
        scale = torch.full((), 1 / batch.num_loss_tokens, dtype=torch.float64, device=CUDA)
        output = model(batch.to(CUDA), scale, greedy=True)
        output.loss.backward()
    assert output.loss.isfinite()


@pytest.mark.parametrize("attn", ["varlen", "sdpa"])
def test_deterministic_mode_repeats_bit_for_bit(attn, monkeypatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model = _model(CUDA, torch.bfloat16, attn)
    batch = _batch(5).to(CUDA)
    torch.use_deterministic_algorithms(True)
    try:
        loss, first = _gradients(model, batch)
        for _ in range(3):
            again, gradients = _gradients(model, batch)
            assert again == loss
            assert all(torch.equal(gradients[name], gradient) for name, gradient in first.items())
    finally:
        torch.use_deterministic_algorithms(False)


def _peak(call: Callable[[], object]) -> int:
    """Bytes that `call` needs at its peak beyond what is allocated before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_head_with_a_large_vocabulary_needs_a_quarter_of_the_memory() -> None:
    """Field case R93: 8192 tokens, 128k ids: peak at most 1/4 of the plain computation's, with the same gradients."""
    generator = torch.Generator(CUDA).manual_seed(0)
    hidden = torch.randn(8192, 1024, device=CUDA, dtype=torch.bfloat16, generator=generator).requires_grad_()
    weight = torch.randn(128_256, 1024, device=CUDA, dtype=torch.bfloat16, generator=generator)
    weight = (0.02 * weight).requires_grad_()
    labels = torch.randint(0, 128_256, (8192,), device=CUDA, generator=generator)
    losses: list[torch.Tensor] = []

    def plain() -> None:
        logits = (hidden @ weight.T).float()
        losses.append(F.cross_entropy(logits, labels, reduction="sum"))
        losses[-1].backward()

    def fused() -> None:
        losses.append(linear_cross_entropy(hidden, weight, labels)[0])
        losses[-1].backward()

    peaks, gradients = [], []
    for call in (plain, fused):
        hidden.grad = weight.grad = None
        peaks.append(_peak(call))
        losses[-1] = losses[-1].detach()
        gradients.append({"hidden": hidden.grad, "weight": weight.grad.float()})
    assert peaks[1] <= peaks[0] / 4, peaks
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-4)
    errors = _relative_errors(gradients[1], {name: gradient.float() for name, gradient in gradients[0].items()})
    assert max(errors.values()) < 1e-2, errors
