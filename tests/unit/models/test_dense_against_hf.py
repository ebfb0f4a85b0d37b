"""The dense decoder against Hugging Face's, logits and all gradients, packed and one document at a time."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from models.batch import IGNORE_INDEX

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-one-kv-head": {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 8},
    "llama-no-gqa": {"model_type": "llama", "num_key_value_heads": 4},
    "qwen3": {"model_type": "qwen3"},
    "qwen3-tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3-biases": {"model_type": "qwen3", "attention_bias": True},
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
        _close(gradient, their_gradients[name])


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_whole_rows_equal_hugging_face(model_type, make_model, make_batch) -> None:
    model = make_model(model_type)
    batch = make_batch([[20], [20]], full_rows=True)
    theirs = _twin(model)(input_ids=batch.input_ids).logits
    assert (model.logits(batch) - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_state_dict_has_hugging_face_names(make_model) -> None:
    model = make_model("qwen3", tie_word_embeddings=True)
    names = set(model.state_dict())
    assert names == set(dict(_twin(model).named_parameters()))
    assert {"model.embed_tokens.weight", "model.layers.1.self_attn.q_norm.weight", "model.norm.weight"} <= names
    assert "lm_head.weight" not in names
    assert "lm_head.weight" in make_model("llama").state_dict()


def test_rope_theta_of_either_spelling_is_used(make_model, make_batch) -> None:
    batch = make_batch([[20]])
    flat = make_model(rope_theta=50.0)
    nested = make_model(rope_parameters={"rope_type": "default", "rope_theta": 50.0})
    other = make_model(rope_theta=60.0)
    assert torch.equal(flat.logits(batch), nested.logits(batch))
    assert not torch.equal(flat.logits(batch), other.logits(batch))
