"""Parameter counts and FLOPs against closed forms."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.registry import build_config, build_model

V, D, F, L, H, KV, HD = 96, 32, 48, 2, 4, 2, 12  # as in conftest.TINY
BLOCK_MATRICES = D * H * HD * 2 + D * KV * HD * 2 + 3 * D * F
BLOCK_NORMS = 2 * D


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_counts(tied, make_model) -> None:
    counts = make_model("llama", tie_word_embeddings=tied).count_parameters()
    non_embedding = L * (BLOCK_MATRICES + BLOCK_NORMS) + D
    assert counts.num_non_embedding_params == counts.num_active_non_embedding_params == non_embedding
    assert counts.num_embedding_params == (V * D if tied else 2 * V * D)
    assert counts.num_params == counts.num_non_embedding_params + counts.num_embedding_params


def test_biases_and_qk_norms_count() -> None:
    def build(**arch) -> int:
        fields = {"vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "head_dim": HD}
        fields |= {"num_attention_heads": H, "num_key_value_heads": KV, **arch}
        with torch.device("meta"):
            config = build_config(fields, tokenizer_length=None, special_ids={})
            return build_model(config, seq_len=8, attn="sdpa", dtype=torch.float32).count_parameters().num_params

    plain = build(model_type="llama")
    assert build(model_type="llama", attention_bias=True) - plain == L * ((H + 2 * KV) * HD + D)
    assert build(model_type="llama", mlp_bias=True) - plain == L * (2 * F + D)
    assert build(model_type="qwen3") - plain == L * 2 * HD


def test_counts_agree_with_a_published_model_card() -> None:
    """Qwen3-8B: 8.2B parameters, 6.95B of them non-embedding: the untied head counts as an embedding."""
    fields = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288}
    fields |= {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    with torch.device("meta"):
        config = build_config(fields, tokenizer_length=None, special_ids={})
        counts = build_model(config, seq_len=8, attn="sdpa", dtype=torch.float32).count_parameters()
    assert counts.num_params == 8_190_735_360
    assert round(counts.num_non_embedding_params / 1e9, 2) == 6.95


@pytest.mark.parametrize("tied", [False, True])
def test_flops_count_the_head_and_not_the_look_up(tied, make_model) -> None:
    """Field case R109: the same closed form tied and untied."""
    model = make_model("llama", tie_word_embeddings=tied, attention_bias=True)
    tokens, pairs = 20, 57
    products = 6 * tokens * (L * BLOCK_MATRICES + V * D)
    attention = 3 * L * pairs * H * (2 * HD + 2 * HD)  # scores and values, forward once and backward twice
    assert model.flops(tokens, pairs) == products + attention
    biases = L * ((H + 2 * KV) * HD + D)
    assert model.flops_6dn(tokens) == 6 * tokens * (L * (BLOCK_MATRICES + BLOCK_NORMS) + D + biases + V * D)


def test_flops_are_those_that_are_executed(make_model, make_batch) -> None:
    """Against torch's own counter of products (its count of attention does not know of causality)."""
    model = make_model("llama", num_key_value_heads=H)
    batch = make_batch([[20]], full_rows=True)
    with FlopCounterMode(display=False) as counter:
        model(batch).loss.backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(flops for op, flops in counted.items() if "mm" in str(op))
    in_place = 2 * 20 * V * D  # the head's weight gradient is accumulated in place, which the counter leaves out
    assert products + in_place == model.flops(20, 0)
