"""Models of transformers behind our interface: held against transformers' own on each document alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from models.batch import IGNORE_INDEX, Batch
from models.hf_config import config_from_dict, config_to_dict
from models.init import init_weights
from models.registry import build_config, build_model

VOCAB = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GATED = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2}
SHORT_LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": GATED | {"head_dim": 8},
    "gemma3_text": GATED
    | {"head_dim": 8, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": GATED | {"pad_token_id": 3},
    "phi3-longrope": GATED
    | {
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **SHORT_LONG},
        "original_max_position_embeddings": 32,
    },
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "gpt_neox": SIZES | {"intermediate_size": 48},
    "olmo2": GATED,
    "granite": GATED
    | {"logits_scaling": 8.0, "embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3},
    "cohere": GATED | {"logit_scale": 0.3, "use_qk_norm": True},
    "starcoder2": GATED | dict.fromkeys(("residual_dropout", "embedding_dropout", "attention_dropout"), 0.0),
    "llama": GATED,
}
ROWS = [[5, 4, 11], [1, 18, 1]]


def model_of(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, attn: str = "sdpa", impl: str = "hf", **arch: Any
) -> Any:
    """A tiny model with weights large enough to matter, built on meta as in training."""
    fields = {"model_type": family.partition("-")[0], **FAMILIES[family], **arch}
    config = build_config(fields, tokenizer_length=None, special_ids={})
    with torch.device("meta"):
        model = build_model(config, seq_len=20, attn=attn, dtype=dtype, impl=impl)
    model.to_empty(device=torch.device("cpu"))
    init_weights(dict(model.named_parameters()), std=0.15, seed=seed, rules=model.init_rules())
    return model


def twin_of(model: Any) -> Any:
    """transformers' own model with the same weights."""
    twin: Any = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager", dtype=torch.float32)
    weights = dict(model.state_dict())
    if model.config.model_type == "gpt_neox":  # transformers 5 renames its head when it loads and saves
        weights["lm_head.weight"] = weights.pop("embed_out.weight")
    missing, unexpected = twin.load_state_dict(weights, strict=False)
    assert unexpected == [] and set(missing) == set(model.tied_names)
    return twin.eval()


def their_logits(twin: Any, batch: Batch) -> Tensor:
    """(rows, seq_len, vocab_size), one document at a time and without positions."""
    rows = zip(batch.input_ids, ROWS, strict=True)
    parts = [
        twin(input_ids=part[None], use_cache=False).logits[0] for row, lengths in rows for part in row.split(lengths)
    ]
    return torch.cat(parts).view(*batch.input_ids.shape, -1)


def close(ours: Tensor, theirs: Tensor, limit: float = 1e-5) -> None:
    error = (ours - theirs).norm() / theirs.norm()
    assert error < limit, f"relative error {error:.2e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_loss_and_gradients_equal_transformers_one_by_one(family, make_batch) -> None:
    """Field cases R04, R05: with random weights, every document of a packed row gives what it gives alone."""
    model = model_of(family)
    twin, batch = twin_of(model), make_batch(ROWS)
    theirs = their_logits(twin, batch)
    loss = nn.functional.cross_entropy(
        theirs.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    loss.backward()
    output = model(batch, greedy=True)
    output.loss.backward()
    close(model.logits(batch), theirs)
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert torch.equal(output.greedy_hits, (theirs.argmax(-1) == batch.labels) & (batch.labels != IGNORE_INDEX))
    gradients = {model.own_name(name): parameter.grad for name, parameter in twin.named_parameters()}
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == gradients.keys()
    largest = max(gradient.norm() for gradient in gradients.values())
    pad = model.config.pad_token_id
    for name, gradient in gradients.items():
        if pad is not None and name.endswith("embed_tokens.weight"):
            # transformers gives the padding id no gradient, although here it is an id like others.
            assert gradient[pad].norm() == 0 and ours[name][pad].norm() > 0
            ours[name][pad] = 0
        assert (ours[name] - gradient).norm() < 1e-5 * gradient.norm() + 1e-7 * largest, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_editing_one_document_leaves_the_others_untouched(family, dtype, make_batch) -> None:
    """Field case R04, to the last bit."""
    model = model_of(family, dtype=dtype)
    batch = make_batch([[7, 9, 4]])
    before = model.logits(batch)
    batch.input_ids[0, 2] = (batch.input_ids[0, 2] + 1) % VOCAB
    after = model.logits(batch)
    assert torch.equal(before[0, 7:], after[0, 7:]) and torch.equal(before[0, :2], after[0, :2])
    assert not torch.equal(before[0, 2:7], after[0, 2:7])


@pytest.mark.parametrize("extra", [{}, {"tie_word_embeddings": True}])
def test_llama_of_transformers_equals_ours(extra, make_batch) -> None:
    theirs, ours = model_of("llama", **extra), model_of("llama", impl="custom", **extra)
    assert (theirs.impl, ours.impl) == ("hf", "custom")
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert theirs.tied_names == ours.tied_names
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, ours.state_dict()[name]), name
    for rows, full_rows in ((ROWS, False), ([[20], [20]], True)):
        batch = make_batch(rows, full_rows=full_rows)
        close(theirs.logits(batch), ours.logits(batch))
        for model in (theirs, ours):
            model.zero_grad()
            model(batch).loss.backward()
        for (name, one), other in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None, name
            close(one.grad, other.grad)
    assert theirs.count_parameters() == ours.count_parameters()
    assert theirs.matrix_shapes == ours.matrix_shapes
    assert theirs.flops(7, 11) == ours.flops(7, 11) and theirs.flops_6dn(7) == ours.flops_6dn(7)
    assert theirs.vocabulary_names == ours.vocabulary_names


def test_counts_of_fused_and_transposed_projections() -> None:
    """Hand counts: fused q/k/v of phi3; gpt2's transposed matrices, whose learned positions are no embedding here."""
    phi3 = model_of("phi3").matrix_shapes
    assert phi3.block_params == 2 * (32 * (32 + 2 * 16) + 32 * 32 + 32 * 2 * 48 + 48 * 32)
    assert (phi3.head_params, phi3.attention_width) == (96 * 32, 2 * 4 * 8)
    gpt2 = model_of("gpt2")
    assert gpt2.matrix_shapes.block_params == 2 * 12 * 32 * 32
    counts = gpt2.count_parameters()
    assert counts.num_embedding_params == 96 * 32
    assert counts.num_non_embedding_params == 32 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32


@pytest.mark.parametrize("family", ["phi3-longrope", "gemma3_text", "gpt_neox"])
def test_buffers_are_those_of_transformers(family) -> None:
    """Field case R92: built on meta, RoPE's frequencies and scales have their values, and keep them when the parameters
    get memory again."""
    model = model_of(family)
    model.to_empty(device=torch.device("cpu"))
    theirs = dict(AutoModelForCausalLM.from_config(model.config).named_buffers())
    ours = dict(model.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, buffer in theirs.items():
        assert ours[name].dtype == torch.float32 and torch.equal(ours[name], buffer), name


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputing_changes_nothing(mode, make_batch) -> None:
    plain, recomputing = model_of("phi3"), model_of("phi3")
    names = list(plain.state_dict())
    recomputing.apply_activation_checkpointing(mode, 1)
    assert list(recomputing.state_dict()) == names
    first, second = make_batch(ROWS), make_batch([[3, 17], [20]], seed=1)
    gradients = []
    for model in (plain, recomputing):
        # Two forward passes before the first backward: each is recomputed with its own documents.
        losses = [model(first).loss, model(second).loss]
        for loss in losses:
            loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_first_values_are_those_of_the_family() -> None:
    """Gains that are added to 1 (gemma) begin with 0, others with 1, biases with 0."""
    vectors = {
        family: {name: parameter for name, parameter in model_of(family).named_parameters() if parameter.dim() == 1}
        for family in ("gemma", "gpt2", "olmo2")
    }
    assert all((vector == 0).all() for vector in vectors["gemma"].values())
    assert all((vector == 1).all() for vector in vectors["olmo2"].values())
    for name, vector in vectors["gpt2"].items():
        is_gain = "ln_" in name and name.endswith("weight")
        assert (vector == (1 if is_gain else 0)).all(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_survives_json(family) -> None:
    fields = {"model_type": family.partition("-")[0], **FAMILIES[family]}
    config = build_config(fields, tokenizer_length=None, special_ids={"eos_token_id": 2})
    assert config_from_dict(config_to_dict(config)).to_dict() == config.to_dict()


def test_the_callers_random_numbers_are_left_alone() -> None:
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    model_of("olmo2")
    assert torch.equal(torch.random.get_rng_state(), state)


def test_float64(make_batch) -> None:
    model = model_of("olmo2", dtype=torch.float64)
    output = model(make_batch(ROWS))
    assert output.nats.dtype == torch.float64 and output.loss.isfinite()
