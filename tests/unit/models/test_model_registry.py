"""`[model.arch]` to a config: defaults, and every refusal with its key."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from models.errors import ArchError
from models.registry import build_config, build_model

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
FULL = ["full_attention"]
IDS: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": 7, "pad_token_id": 3}


def _build(tokenizer_length: int | None = 300, **arch: Any) -> PretrainedConfig:
    return build_config({**TINY, **arch}, tokenizer_length=tokenizer_length, special_ids=IDS)


def _rope(rope_type: str, rope_theta: float = 1e4, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": rope_theta, **parameters}}


def _model(config: PretrainedConfig, seq_len: int = 16, attn: str = "sdpa") -> None:
    with torch.device("meta"):
        build_model(config, seq_len=seq_len, attn=attn, dtype=torch.float32)


def _refused(key: str, message: str, call: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(ArchError, match=message) as caught:
        call(*args, **kwargs)
    assert caught.value.key == key


def test_vocabulary_and_special_ids_come_from_the_tokenizer() -> None:
    config = _build()
    assert isinstance(config, LlamaConfig)
    assert config.vocab_size == 384
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 7, 3)
    assert _build(tokenizer_length=256).vocab_size == 256
    assert isinstance(_build(model_type="qwen3", head_dim=8), Qwen3Config)


def test_given_vocabulary_and_special_ids_win() -> None:
    config = _build(vocab_size=301, eos_token_id=[1, 2])
    assert (config.vocab_size, config.eos_token_id) == (301, [1, 2])
    assert _build(tokenizer_length=None, vocab_size=5, eos_token_id=0, pad_token_id=None).vocab_size == 5


def test_vocabulary_smaller_than_the_tokenizer_is_refused() -> None:
    """Field case R47: an id beyond the embedding would end the run in a CUDA assert."""
    _refused("vocab_size", "299 is less than the tokenizer's 300", _build, vocab_size=299)
    _refused("vocab_size", "needed where no tokenizer", _build, tokenizer_length=None)
    _refused("eos_token_id", "300 is outside the vocabulary", _build, vocab_size=300, eos_token_id=300)


def test_unknown_fields_and_types_are_refused_with_the_nearest_name() -> None:
    """Field case R111."""
    _refused("hiden_size", "did you mean hidden_size", _build, hiden_size=3)
    _refused("layer_types", "llama has no such field", _build, layer_types=["full_attention"])
    _refused("model_type", "did you mean llama", _build, model_type="lama")
    _refused("model_type", "it is one of llama, mistral, qwen2", _build, model_type="what is this")
    _refused("model_type", "None", build_config, {"hidden_size": 3}, tokenizer_length=3, special_ids=IDS)


def test_values_that_the_config_class_refuses_are_refused_here() -> None:
    _refused("hidden_size", "expected int, got str", _build, hidden_size="wide")
    _refused("num_attention_heads", "must be at least 1", _build, num_attention_heads=0)
    _refused("", "not a multiple", _build, hidden_size=33)
    _refused("is_encoder_decoder", "only decoders", _build, is_encoder_decoder=True)


def test_fields_of_a_downloaded_config_are_accepted() -> None:
    config = _build(architectures=["LlamaForCausalLM"], use_cache=True, rope_theta=5e5, initializer_range=0.01)
    assert config.rope_parameters["rope_theta"] == 5e5
    _model(config)


@pytest.mark.parametrize(
    ("key", "message", "arch"),
    [
        (
            "rope_parameters",
            "partial_rotary_factor",
            {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}},
        ),
        ("rope_parameters", "the default RoPE has no factor", _rope("default", factor=2.0)),
        ("rope_parameters", "dynamic is not implemented; it is one of default, linear", _rope("dynamic", factor=2.0)),
        ("rope_parameters", "longrope is not implemented", _rope("longrope", short_factor=[1.0], long_factor=[2.0])),
        ("rope_parameters", "proportional is not implemented", _rope("proportional")),
        ("rope_parameters", "factor", _rope("linear")),
        ("rope_parameters", "factor of the linear RoPE must be at least 1", _rope("linear", factor=0.5)),
        ("rope_parameters", "factor must be a number", _rope("linear", factor=float("nan"))),
        ("rope_parameters", "factor must be a number", _rope("linear", factor=True)),
        ("rope_parameters", "the linear RoPE has no beta_fast", _rope("linear", factor=2.0, beta_fast=3.0)),
        ("rope_parameters", "rope_theta must be above 0", _rope("default", rope_theta=0.0)),
        ("rope_parameters", "low_freq_factor", _rope("llama3", factor=2.0, high_freq_factor=4.0)),
        ("rope_parameters", "low_freq_factor", _rope("llama3", factor=2.0, high_freq_factor=4.0, low_freq_factor=None)),
        (
            "rope_parameters",
            "high_freq_factor above low_freq_factor",
            _rope("llama3", factor=2.0, high_freq_factor=1.0, low_freq_factor=1.0),
        ),
        ("rope_parameters", "low_freq_factor must be a number, not 'one'", _rope("llama3", low_freq_factor="one")),
        ("rope_scaling", "must be a table of RoPE parameters, not 'yarn'", {"rope_scaling": "yarn"}),
        ("rope_scaling", "Missing required keys.*factor", {"rope_scaling": {"type": "yarn", "factor": None}}),
        ("rope_parameters", "beta_fast not below beta_slow", _rope("yarn", factor=2.0, beta_fast=0.5)),
        ("rope_parameters", "attention_factor above 0", _rope("yarn", factor=2.0, attention_factor=0.0)),
        ("rope_parameters", "the yarn RoPE has no low_freq_factor", _rope("yarn", factor=2.0, low_freq_factor=1.0)),
        (
            "rope_parameters",
            "each layer type",
            {"model_type": "qwen3", "head_dim": 8, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        ),
        ("hidden_act", "only silu", {"hidden_act": "gelu"}),
        ("rms_norm_eps", "at least 0 and below 1", {"rms_norm_eps": float("nan")}),
        ("rope_parameters", "factor must be a number", _rope("linear", factor=10**400)),
        ("attention_dropout", "0.1", {"attention_dropout": 0.1}),
        ("num_key_value_heads", "not a multiple of 3", {"num_key_value_heads": 3}),
        ("head_dim", "even", {"head_dim": 7}),
        ("head_dim", "2 or more, not 0", {"model_type": "qwen2", "hidden_size": 2}),
        ("pretraining_tp", "only 1", {"pretraining_tp": 2}),
        ("chunk_size_feed_forward", "only 0", {"chunk_size_feed_forward": 2}),
        ("sliding_window", "8 is shorter than seq_len = 16", {"model_type": "mistral", "sliding_window": 8}),
        ("sliding_window", "need its length", {"model_type": "smollm3", "use_sliding_window": True}),
        (
            "sliding_window",
            "15 is shorter than seq_len = 16",
            {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 15, "no_rope_layers": [0]},
        ),
        (
            "sliding_window",
            "15 is shorter than seq_len = 16",
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 15, "max_window_layers": 0},
        ),
        ("no_rope_layers", "a 0 or 1 for each", {"model_type": "smollm3", "no_rope_layers": [2]}),
        ("no_rope_layers", "a 0 or 1 for each", {"model_type": "smollm3", "no_rope_layers": [], "layer_types": FULL}),
        ("layer_types", "chunked", {"model_type": "qwen3", "layer_types": ["chunked_attention"]}),
        (
            "sliding_window",
            "15 is shorter than seq_len = 16",
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 15, "max_window_layers": 0},
        ),
    ],
)
def test_what_is_not_implemented_is_refused(key, message, arch) -> None:
    _refused(key, message, lambda: _model(_build(**arch)))


def test_windows_that_never_cut_are_accepted() -> None:
    _model(_build(model_type="qwen3", use_sliding_window=True, sliding_window=16, max_window_layers=0))
    _model(_build(model_type="qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1))
    _model(_build(model_type="mistral", sliding_window=16))
    _model(_build(model_type="mistral", sliding_window=None), seq_len=64)
    _model(_build(model_type="smollm3", sliding_window=8))
    _model(_build(max_position_embeddings=8), seq_len=64)


def test_attention_that_cannot_be_had_is_refused() -> None:
    _refused("head_dim", "multiples of 8", _model, _build(head_dim=12), attn="varlen")
    _refused("", "'flash' is not implemented", _model, _build(), attn="flash")
    _model(_build(head_dim=16), attn="varlen")


def test_a_config_of_another_family_is_refused() -> None:
    class OtherConfig(PretrainedConfig):
        model_type = "other"

    _refused("model_type", "'other' is unknown", _model, OtherConfig())
