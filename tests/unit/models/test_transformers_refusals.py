"""What models of transformers are refused for: by name where we know it, by the check on a small twin where not."""

from typing import Any

import pytest
import torch
from transformers.models.olmo2 import modeling_olmo2

from models.errors import ArchError
from models.registry import build_config, build_model

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GATED = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def build(model_type: str, *, seq_len: int = 16, impl: str = "auto", attn: str = "sdpa", **fields: Any) -> Any:
    arch = {"model_type": model_type, **fields}
    config = build_config(arch, tokenizer_length=None, special_ids={})
    with torch.device("meta"):
        return build_model(config, seq_len=seq_len, attn=attn, dtype=torch.float32, impl=impl)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma2", **GATED}, "attn_logit_softcapping: soft-capping is not implemented"),
        (
            {"model_type": "gemma2", **GATED, "attn_logit_softcapping": None},
            "final_logit_softcapping: soft-capping is not implemented",
        ),
        ({"model_type": "phi3", **GATED, "sliding_window": 15}, "sliding_window: 15 is shorter than seq_len = 16"),
        (
            {"model_type": "gemma3_text", **GATED, "head_dim": 8, "sliding_window": 15},
            "sliding_window: 15 is shorter than seq_len = 16",
        ),
        (
            {"model_type": "mamba", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2},
            "attention of mamba in a way of its own",
        ),
        (
            {"model_type": "lfm2", **GATED, "layer_types": ["conv", "full_attention"]},
            "layer_types: layers of type conv are not implemented",
        ),
        ({"model_type": "gpt_oss", **GATED, **EXPERTS}, "num_local_experts: mixtures of experts"),
        ({"model_type": "mixtral", **GATED, **EXPERTS}, "mixtures of experts"),
        ({"model_type": "bloom", "vocab_size": 96, "hidden_size": 32}, "transformers computes the attention of bloom"),
        ({"model_type": "phi", **GATED}, "phi has a head or an embedding of a kind"),
        (
            {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4},
            "dropout is not implemented",
        ),
        ({"model_type": "diffllama", **GATED}, "diffllama call transformers' attention interface 4 times"),
        (
            {"model_type": "qwen2", **GATED, "rope_parameters": DYNAMIC, "max_position_embeddings": 15},
            "beyond 15 posit",
        ),
        ({"model_type": "bart", "vocab_size": 96}, "is_encoder_decoder: only decoders"),
        ({"model_type": "granite_swa", **GATED}, "asks for s_aux, which is not implemented"),
    ],
)
def test_what_is_not_computed_exactly_is_refused_at_build(fields, message) -> None:
    """Field case R06: a hard error at start, not a warning."""
    with pytest.raises(ArchError) as caught:
        build(**{"impl": "hf", **fields})
    assert message in str(caught.value)


def test_learned_positions_end() -> None:
    fields = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 15}
    fields |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    with pytest.raises(ArchError, match="gpt2 has learned positions up to 15, fewer than seq_len = 16"):
        build("gpt2", **fields)
    build("gpt2", seq_len=15, **fields)


def test_windows_and_changing_rope_that_never_act_are_accepted() -> None:
    build("phi3", **GATED, sliding_window=16)
    build("qwen2", impl="hf", **GATED, rope_parameters=DYNAMIC, max_position_embeddings=16)


def test_only_implemented_families_are_custom() -> None:
    assert build("llama", **GATED).impl == "custom"
    assert build("olmo2", **GATED).impl == "hf"
    with pytest.raises(ArchError, match=r'olmo2 is none of the families implemented here .*model.impl = "hf"'):
        build("olmo2", impl="custom", **GATED)


def test_a_refusal_of_ours_names_transformers_where_that_can() -> None:
    with pytest.raises(ArchError, match=r'only silu is implemented, not gelu; .*model.impl = "hf"'):
        build("llama", **GATED, hidden_act="gelu")
    with pytest.raises(ArchError) as caught:
        build("mistral", **GATED, sliding_window=15)
    assert "model.impl" not in str(caught.value), "transformers cannot either"
    assert build("llama", impl="hf", **GATED, hidden_act="gelu").impl == "hf"


def test_varlen_attention_wants_heads_that_fit() -> None:
    with pytest.raises(ArchError, match="varlen attention takes multiples of 8 up to 256, not 4"):
        build("olmo2", attn="varlen", **GATED, head_dim=4)
    build("olmo2", attn="varlen", **GATED)


def _mix(leak: float) -> Any:
    forward = modeling_olmo2.Olmo2MLP.forward

    def mixing(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return forward(self, hidden) + leak * hidden.roll(1, 1)

    return mixing


@pytest.mark.parametrize(
    ("leak", "message"),
    [(1.0, "olmo2 on packed documents differs"), (1e-6, "tokens of olmo2 act on other documents")],
)
def test_tokens_that_meet_outside_of_attention_are_found(leak, message, monkeypatch) -> None:
    """A release of transformers that mixes neighbours somewhere, however little."""
    monkeypatch.setattr(modeling_olmo2.Olmo2MLP, "forward", _mix(leak))
    with pytest.raises(ArchError, match=message):
        build("olmo2", **GATED)


def test_a_forward_pass_that_looks_at_values_is_found(monkeypatch) -> None:
    forward = modeling_olmo2.Olmo2MLP.forward

    def looking(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return forward(self, hidden) if hidden.amax() < 1e9 else hidden

    monkeypatch.setattr(modeling_olmo2.Olmo2MLP, "forward", looking)
    with pytest.raises(ArchError, match="olmo2 cannot be computed inside documents"):
        build("olmo2", **GATED)


@pytest.mark.parametrize(
    ("argument", "message"),
    [({"softcap": 30.0}, "asks for softcap"), ({"dropout": 0.1}, "dropout"), ({"is_causal": False}, "not causal")],
)
def test_an_attention_that_asks_for_more_is_found(argument, message, monkeypatch) -> None:
    """Whatever a layer hands to its attention function and ours does not know is an error, in every forward pass."""
    lookup = modeling_olmo2.ALL_ATTENTION_FUNCTIONS.get_interface

    class Asking:
        def get_interface(self, name: str, default: Any) -> Any:
            function = lookup(name, default)
            return lambda *args, **kwargs: function(*args, **{**kwargs, **argument})

    monkeypatch.setattr(modeling_olmo2, "ALL_ATTENTION_FUNCTIONS", Asking())
    with pytest.raises(ArchError, match=message):
        build("olmo2", **GATED)
