"""The dense decoder against Hugging Face's, logits and all gradients, packed and one document at a time."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from models.batch import IGNORE_INDEX
from models.layers.rope import rope_table

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-one-kv-head": {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 8},
    "llama-no-gqa": {"model_type": "llama", "num_key_value_heads": 4},
    "qwen3": {"model_type": "qwen3"},
    "qwen3-tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3-biases": {"model_type": "qwen3", "attention_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 1,
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 64, "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "smollm3-untied-biases": {
        "model_type": "smollm3",
        "no_rope_layers": [0, 1],
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
}
# Short original lengths, so that 20 positions reach all parts of the scaling.
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 40,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-betas-untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.7,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "yarn-mscale-alone": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.5,
    },
    "yarn-tiny-original": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4},
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
VARIANTS |= {
    f"{model_type}-{name}": {"model_type": model_type, "rope_parameters": {**rope, "rope_theta": 1000.0}}
    for index, (name, rope) in enumerate(ROPES.items())
    for model_type in (FAMILIES if name in ("linear", "llama3", "yarn") else (FAMILIES[index % 5],))
}
ROWS = [[5, 4, 11], [1, 18, 1]]


def _twin(model: Any) -> nn.Module:
    """Hugging Face's model with the same weights."""
    twin = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager", dtype=torch.float32)
    missing, unexpected = twin.load_state_dict(model.state_dict(), strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if model.config.tie_word_embeddings else [])
    return twin


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = (ours - theirs).norm() / theirs.norm()
    assert error < 1e-5, f"relative error {error:.2e}"


def _without_effect(model: Any) -> set[str]:
    """The key biases of layers without RoPE: they add the same to all scores of a query, so their gradient is rounding
    noise around 0 and has no relative error."""
    layers = enumerate(model.layout.rope_layers)
    return {f"model.layers.{index}.self_attn.k_proj.bias" for index, rotated in layers if not rotated}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_loss_and_gradients_equal_hugging_face(variant, make_model, make_batch) -> None:
    model = make_model(**VARIANTS[variant])
    twin = _twin(model)
    batch = make_batch(ROWS)

    # Hugging Face sees one document at a time: the packed row must give the same.
    theirs: list[torch.Tensor] = []
    for row, lengths in enumerate(ROWS):
        ids = batch.input_ids[row].split(lengths)
        theirs += [twin(input_ids=document[None]).logits[0] for document in ids]
    their_logits = torch.cat(theirs).view(2, 20, -1)
    their_loss = nn.functional.cross_entropy(
        their_logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    their_loss.backward()

    output = model(batch)
    output.loss.backward()
    logits = model.logits(batch)
    assert (logits - their_logits).abs().max() < 1e-5 * their_logits.abs().max()
    assert output.loss.item() == pytest.approx(their_loss.item(), rel=1e-6)
    their_gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    our_gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in our_gradients.items():
        if name in _without_effect(model):
            total = sum(parameter.grad.norm() for parameter in twin.parameters())
            assert max(gradient.norm(), their_gradients[name].norm()) < 1e-6 * total
        else:
            _close(gradient, their_gradients[name])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_whole_rows_equal_hugging_face(model_type, make_model, make_batch) -> None:
    model = make_model(model_type)
    batch = make_batch([[20], [20]], full_rows=True)
    theirs = _twin(model)(input_ids=batch.input_ids).logits
    assert (model.logits(batch) - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_state_dicts_have_the_same_names_and_load_both_ways(model_type, tied, make_model) -> None:
    model = make_model(model_type, tie_word_embeddings=tied)
    twin = _twin(model)
    names = set(model.state_dict())
    assert names == set(dict(twin.named_parameters()))
    assert names == set(twin.state_dict()) - ({"lm_head.weight"} if tied else set())
    assert ("lm_head.weight" in names) != tied
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: parameter.shape for name, parameter in twin.named_parameters()} == shapes

    other = make_model(model_type, tie_word_embeddings=tied, seed=1)
    other.load_state_dict(dict(twin.named_parameters()))
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in other.state_dict().items())


@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_variant_differs_from_the_default_within_the_rows_of_these_tests(rope, make_model) -> None:
    """Else the comparison with Hugging Face would show nothing."""
    positions = torch.arange(18)[None]
    tables = []
    for parameters in ({"rope_type": "default"}, ROPES[rope]):
        model = make_model(rope_parameters={**parameters, "rope_theta": 1000.0})
        tables.append(torch.stack(rope_table(positions, model.model.rope, torch.float64)))
    assert (tables[1] - tables[0]).abs().max() > 0.05


def test_rope_theta_of_either_spelling_is_used(make_model, make_batch) -> None:
    batch = make_batch([[20]])
    flat = make_model(rope_theta=50.0)
    nested = make_model(rope_parameters={"rope_type": "default", "rope_theta": 50.0})
    other = make_model(rope_theta=60.0)
    assert torch.equal(flat.logits(batch), nested.logits(batch))
    assert not torch.equal(flat.logits(batch), other.logits(batch))
