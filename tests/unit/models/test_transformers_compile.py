"""Compiled layers of transformers' models: one graph for look-alike layers, none anew from batch to batch."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from models.init import init_weights
from models.registry import build_config, build_model

ARCH: dict[str, Any] = {
    "model_type": "olmo2",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def _capture_only(monkeypatch) -> Iterator[None]:
    """Stops after graph capture, which decides about recompilation; the real backend would take a minute."""
    compile_with = torch.compile

    def capture(function: Any, mode: str | None = None, **options: Any) -> Any:
        return compile_with(function, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", capture)
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        yield
    torch._dynamo.reset()


def _model() -> Any:
    config = build_config(ARCH, tokenizer_length=None, special_ids={})
    with torch.device("meta"):
        model = build_model(config, seq_len=20, attn="sdpa", dtype=torch.float32)
    model.to_empty(device=torch.device("cpu"))
    init_weights(dict(model.named_parameters()), std=0.15, seed=0, rules=model.init_rules())
    return model


def _gradients(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(batch).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("full_rows", [True, False])
def test_compiled_layers_share_their_graphs(full_rows, make_batch) -> None:
    model, plain = _model(), _model()
    model.apply_activation_checkpointing("selective", 2)
    model.compile_blocks("default", fullgraph=full_rows)
    assert list(model.state_dict()) == list(plain.state_dict())
    batches = [make_batch(rows, full_rows=full_rows) for rows in ([[20], [20]], [[20], [20]])]
    if not full_rows:
        batches = [make_batch(rows) for rows in ([[9, 11], [20]], [[1, 1, 18], [4, 16]], [[3, 17], [1, 19]])]
    _gradients(model, batches[0])
    graphs = counters["stats"]["unique_graphs"]
    if full_rows:
        assert graphs == 2, "a layer that is recomputed and one that is not"
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches[1:]:
            expected = _gradients(plain, batch)
            for name, gradient in _gradients(model, batch).items():
                assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
    assert counters["stats"]["unique_graphs"] == graphs


def test_fullgraph_refuses_packed_rows_with_sdpa(make_batch) -> None:
    model = _model()
    model.compile_blocks("default", fullgraph=True)
    with pytest.raises(ValueError, match=r'model\.compile\.fullgraph does not go with attn = "sdpa"'):
        model(make_batch([[9, 11]]))
