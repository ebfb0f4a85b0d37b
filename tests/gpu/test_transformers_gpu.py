"""Models of transformers on a GPU: documents apart, the CPU's numbers, no host sync, no recompilation."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from models.base import CausalLM
from models.batch import Batch
from models.init import init_weights
from models.registry import build_config, build_model
from trainer.data.collate import collate
from trainer.data.row import Rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCAB, ROWS, SEQ_LEN = 1024, 2, 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": SEQ_LEN,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmo2": {"num_key_value_heads": 2},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 3},
    "gemma": {"num_key_value_heads": 1, "head_dim": 64},
    "granite": {"num_key_value_heads": 2, "attention_multiplier": 0.2, "logits_scaling": 4.0},
    "gpt_neox": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
}
CUDA = torch.device("cuda")


def _model(family: str, device: torch.device, dtype: torch.dtype, attn: str) -> CausalLM:
    config = build_config({"model_type": family, **SIZES, **FAMILIES[family]}, tokenizer_length=None, special_ids={})
    with torch.device("meta"):
        model = build_model(config, seq_len=SEQ_LEN, attn=attn, dtype=torch.float32)
    model.to_empty(device=device)
    init_weights(dict(model.named_parameters()), std=0.02, seed=0, rules=model.init_rules())
    # Parameters alone, as in training: the buffers stay in fp32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(dtype)
    return model


def _batch(seed: int, *, full_rows: bool = False, pin_memory: bool = False) -> Batch:
    generator = np.random.default_rng(seed)
    rows = Rows.empty(ROWS, SEQ_LEN)
    tokens = generator.integers(0, VOCAB, (ROWS, SEQ_LEN + 1))
    rows.input_ids[:], rows.labels[:] = tokens[:, :-1], tokens[:, 1:]
    for row in range(ROWS):
        lengths = [SEQ_LEN] if full_rows else []
        while sum(lengths) < SEQ_LEN:
            lengths.append(min(int(2 ** generator.uniform(0, 9)), SEQ_LEN - sum(lengths)))
        rows.segment_lengths[row] = np.array(lengths)
    return collate(rows, full_rows=full_rows, pin_memory=pin_memory)


def _gradients(model: CausalLM, batch: Batch) -> tuple[float, torch.Tensor]:
    """Loss, and all gradients as one vector on the CPU."""
    model.zero_grad()
    scale = torch.full((), 1 / batch.num_loss_tokens, dtype=torch.float64, device=batch.input_ids.device)
    loss = model(batch, scale).loss
    loss.backward()
    gradients = [
        parameter.grad.float().flatten().cpu() for parameter in model.parameters() if parameter.grad is not None
    ]
    return loss.item(), torch.cat(gradients)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("attn", ["varlen", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_editing_one_document_leaves_the_others_untouched(family, attn) -> None:
    """Field case R04: the logits of every other document differ by exactly 0."""
    model = _model(family, CUDA, torch.bfloat16, attn)
    batch = _batch(0).to(CUDA)
    first = int(batch.segments.host_cu_seqlens[1])
    with torch.no_grad():
        before = model.logits(batch).flatten(0, 1)
        edited = batch.input_ids.flatten()
        edited[:first] = (edited[:first] + 1) % VOCAB
        after = model.logits(batch).flatten(0, 1)
    assert not torch.equal(before[:first], after[:first])
    assert torch.equal(before[first:], after[first:])


@pytest.mark.parametrize(("dtype", "attn"), [("bfloat16", "varlen"), ("bfloat16", "sdpa"), ("float32", "sdpa")])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_cpu_in_float32(family, dtype, attn) -> None:
    batch = _batch(1)
    expected_loss, expected = _gradients(_model(family, torch.device("cpu"), torch.float32, "sdpa"), batch)
    loss, gradients = _gradients(_model(family, CUDA, getattr(torch, dtype), attn), batch.to(CUDA))
    assert loss == pytest.approx(expected_loss, rel=1e-3 if dtype == "bfloat16" else 1e-6)
    error = ((gradients - expected).norm() / expected.norm()).item()
    assert error < (3e-2 if dtype == "bfloat16" else 1e-5), error


@pytest.mark.parametrize("attn", ["varlen", "sdpa"])
@pytest.mark.parametrize("full_rows", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_backward_never_wait_for_the_gpu(family, attn, full_rows) -> None:
    model = _model(family, CUDA, torch.bfloat16, attn)
    _gradients(model, _batch(0, full_rows=full_rows).to(CUDA))
    batch = _batch(1, full_rows=full_rows, pin_memory=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scale = torch.full((), 1 / batch.num_loss_tokens, dtype=torch.float64, device=CUDA)
        output = model(batch.to(CUDA), scale, greedy=True)
        output.loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.loss.isfinite()


def test_packed_batches_never_recompile_after_warm_up() -> None:
    """One graph for all layers and document counts."""
    model = _model("olmo2", CUDA, torch.bfloat16, "varlen")
    model.apply_activation_checkpointing("selective", 1)
    model.compile_blocks("default", fullgraph=True)
    for seed in range(3):
        _gradients(model, _batch(seed).to(CUDA))
    assert counters["stats"]["unique_graphs"] == 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3, 13):
            _gradients(model, _batch(seed).to(CUDA))
    assert counters["stats"]["unique_graphs"] == 1
