"""Compiled blocks: same values, one graph per shape, no recompilation from batch to batch, clear refusals.

What needs CUDA is traced here too: a stand-in takes the place of the varlen kernel on CPU. Only the first test pays
for the real backend; the others stop after graph capture, which is what decides about recompilation.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention

from models.layers.attention import AttentionForm
from models.layers.self_attention import SequenceContext


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def _capture_only(monkeypatch) -> None:
    compile_with = torch.compile

    def capture(function: Any, mode: str | None = None, **options: Any) -> Any:
        return compile_with(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", capture)


@pytest.fixture
def varlen_on_cpu(monkeypatch) -> Iterator[list[tuple[int, int]]]:
    """Varlen attention on CPU through stand-in kernels; gives the (borders, longest) of each call."""
    calls: list[tuple[int, int]] = []

    def documents(cu_seqlens: torch.Tensor) -> list[slice]:
        ends = cu_seqlens.tolist()
        return [slice(start, end) for start, end in pairwise(ends) if end > start]

    def forward(query, key, value, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **window) -> Any:
        assert causal and (window["window_size_left"], window["window_size_right"]) == (-1, 0)
        calls.append((cu_q.numel(), max_q))
        out = torch.empty_like(query)
        for part in documents(cu_q):
            assert part.stop - part.start <= max_q
            q, k, v = (heads[part].transpose(0, 1)[None] for heads in (query, key, value))
            out[part] = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        empty = query.new_empty(0)
        return out, query.new_zeros(query.shape[1::-1]), torch.zeros(2, dtype=torch.uint64), empty, empty

    def backward(grad, query, key, value, out, lse, cu_q, *_args, **_options) -> Any:
        groups, scale = query.size(1) // key.size(1), query.size(2) ** -0.5
        grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
        for part in documents(cu_q):
            q, g = query[part].transpose(0, 1), grad[part].transpose(0, 1)
            k, v = (heads[part].transpose(0, 1).repeat_interleave(groups, 0) for heads in (key, value))
            future = torch.ones(q.size(1), q.size(1), dtype=torch.bool).triu(1)
            weights = (q @ k.mT * scale).masked_fill(future, -torch.inf).softmax(-1)
            grad_weights = g @ v.mT
            grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * scale
            grads[0][part] = (grad_scores @ k).transpose(0, 1)
            for into, each in ((grads[1], grad_scores.mT @ q), (grads[2], weights.mT @ g)):
                into[part] = each.view(-1, groups, *each.shape[1:]).sum(1).transpose(0, 1)
        return tuple(grads)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    make_context = SequenceContext.__init__

    def make_varlen_context(self: SequenceContext, batch: Any, **options: Any) -> None:
        make_context(self, batch, **{**options, "attn": "sdpa"})
        if options["attn"] == "varlen" and self.form is AttentionForm.SEGMENTS:
            self.form = AttentionForm.VARLEN

    monkeypatch.setattr(SequenceContext, "__init__", make_varlen_context)
    yield calls
    library._destroy()


def _random_lengths(generator: np.random.Generator, seq_len: int) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) < seq_len:
        lengths.append(min(int(2 ** generator.uniform(0, 6)), seq_len - sum(lengths)))
    return lengths


def _gradients(model: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(batch).loss
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def _assert_same(ours: tuple[float, dict], reference: tuple[float, dict]) -> None:
    assert ours[0] == pytest.approx(reference[0], rel=1e-5)
    assert ours[1].keys() == reference[1].keys()
    largest = max(gradient.norm() for gradient in reference[1].values())
    for name, gradient in reference[1].items():
        assert (ours[1][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6 * largest, name


def test_compiled_model_equals_the_plain_one(make_model, make_batch) -> None:
    """The real backend, on whole rows and on packed ones."""
    model, plain = make_model("qwen3"), make_model("qwen3")
    names = list(model.state_dict())
    model.compile_blocks("default", fullgraph=False)
    assert list(model.state_dict()) == names
    for batch in (make_batch([[20], [20]], full_rows=True), make_batch([[9, 11], [20]])):
        _assert_same(_gradients(model, batch), _gradients(plain, batch))


@pytest.mark.usefixtures("_capture_only")
@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_varlen_graph_serves_every_batch(recompute, varlen_on_cpu, make_model, make_batch) -> None:
    """One graph for both layers and all document counts; a validation shape gets its own and disturbs nothing."""
    model, plain = make_model("qwen3", head_dim=16), make_model("qwen3", head_dim=16)
    model.model.attn = "varlen"
    if recompute is not None:
        model.apply_activation_checkpointing(recompute, 1)
    model.compile_blocks("default", fullgraph=True)
    generator = np.random.default_rng(0)

    def batch(seed: int, seq_len: int = 64) -> Any:
        rows = [_random_lengths(generator, seq_len), _random_lengths(generator, seq_len)]
        return make_batch(rows, seed=seed)

    validation = batch(100, seq_len=48)
    _gradients(model, batch(0))
    with torch.no_grad():
        model(validation)
    assert counters["stats"]["unique_graphs"] == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(12):
            made = batch(seed)
            _assert_same(_gradients(model, made), _gradients(plain, made))
        _gradients(model, make_batch([[1] * 64, [1] * 64]))
        with torch.no_grad():
            model(validation)
    assert counters["stats"]["unique_graphs"] == 2
    assert len({borders for borders, _ in varlen_on_cpu}) >= 3 and len({longest for _, longest in varlen_on_cpu}) >= 3


@pytest.mark.usefixtures("_capture_only")
def test_layers_without_rope_share_a_graph_of_their_own(varlen_on_cpu, make_model, make_batch) -> None:
    """smollm3 with biases: two kinds of layers, two graphs, however many layers; packed rows through varlen."""
    arch = {"num_hidden_layers": 6, "no_rope_layers": [1, 0, 0, 1, 1, 0], "attention_bias": True, "head_dim": 16}
    model, plain = make_model("smollm3", **arch), make_model("smollm3", **arch)
    model.model.attn = "varlen"
    model.compile_blocks("default", fullgraph=True)
    for rows in ([[9, 11], [20]], [[3, 4, 13], [19, 1]]):
        batch = make_batch(rows)
        _assert_same(_gradients(model, batch), _gradients(plain, batch))
    assert counters["stats"]["unique_graphs"] == 2
    assert len(varlen_on_cpu) == 2 * 6


def test_varlen_attention_isolates_documents(varlen_on_cpu, make_model, make_batch) -> None:
    """Field case R04, as far as a stand-in kernel can show it: borders and causality reach the kernel."""
    model = make_model(head_dim=16)
    batch = make_batch([[7, 9], [3, 13]])
    expected = model.logits(batch)
    model.model.attn = "varlen"
    torch.testing.assert_close(model.logits(batch), expected, atol=1e-5, rtol=1e-5)
    assert varlen_on_cpu == [(9, 16)] * 2


@pytest.mark.usefixtures("_capture_only")
def test_packed_rows_with_sdpa_compile_around_the_loop(make_model, make_batch) -> None:
    model, plain = make_model(), make_model()
    model.apply_activation_checkpointing("selective", 1)
    model.compile_blocks("default", fullgraph=False)
    _gradients(model, make_batch([[9, 11]]))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in ([[20]], [[1, 2, 3, 14]], [[5, 5, 5, 5]]):
            batch = make_batch(rows)
            _assert_same(_gradients(model, batch), _gradients(plain, batch))


@pytest.mark.usefixtures("_capture_only")
def test_fullgraph_refuses_packed_rows_with_sdpa(make_model, make_batch) -> None:
    model: Callable = make_model()
    model.compile_blocks("default", fullgraph=True)
    with pytest.raises(ValueError, match=r'model\.compile\.fullgraph does not go with attn = "sdpa"'):
        model(make_batch([[9, 11]]))
    model(make_batch([[20]], full_rows=True))


@pytest.mark.usefixtures("_capture_only")
def test_too_many_shapes_are_an_error_not_a_silent_fallback(make_model, make_batch) -> None:
    model = make_model(num_hidden_layers=1)
    model.compile_blocks("default", fullgraph=False)
    with torch._dynamo.config.patch(recompile_limit=3), pytest.raises(Exception, match="recompile_limit"):
        for seq_len in range(10, 15):
            model(make_batch([[seq_len]], full_rows=True))
