"""Hugging Face configs: published ones build with the right sizes, and what cannot be computed is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.errors import ArchError
from models.hf_config import CONFIG_CLASSES, config_from_dict, config_to_dict, known_fields, read_config, shorten
from models.registry import build_model

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 49152,
}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 3.2 1B": (
        {
            **LLAMA,
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "rope_scaling": {**LLAMA3_ROPE, "factor": 32.0, "rope_type": "llama3"},
            "tie_word_embeddings": True,
        },
        1_235_814_400,
    ),
    "Llama 3.1 8B": (
        {
            **LLAMA,
            "eos_token_id": [128001, 128008, 128009],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "rope_scaling": {**LLAMA3_ROPE, "factor": 8.0, "rope_type": "llama3"},
            "tie_word_embeddings": False,
        },
        8_030_261_248,
    ),
    "Qwen2.5 0.5B": (
        {
            **QWEN,
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_window_layers": 24,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_mrope": False,
        },
        494_032_768,
    ),
    "Qwen2.5 7B with YaRN": (
        {
            **QWEN,
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_window_layers": 28,
            "model_type": "qwen2",
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "vocab_size": 152064,
        },
        7_615_616_512,
    ),
    "Qwen3 0.6B": (
        {
            **QWEN,
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "model_type": "qwen3",
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    "Qwen3 8B": (
        {
            **QWEN,
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 40960,
            "max_window_layers": 36,
            "model_type": "qwen3",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        8_190_735_360,
    ),
    "Mistral 7B v0.1": (
        {**MISTRAL, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000},
        7_241_732_096,
    ),
    "Mistral 7B v0.3": (
        {**MISTRAL, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
        7_248_023_552,
    ),
    "SmolLM2 135M": (
        {
            **SMOLLM2,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "rope_interleaved": False,
            "rope_theta": 100000,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
        },
        134_515_008,
    ),
    "SmolLM2 1.7B": (
        {
            **SMOLLM2,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 24,
            "num_key_value_heads": 32,
            "rope_theta": 130000,
        },
        1_711_376_384,
    ),
    "SmolLM3 3B": (
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": 128012,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "mlp_bias": False,
            "model_type": "smollm3",
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 4,
            "pad_token_id": 128004,
            "pretraining_tp": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "torch_dtype": "bfloat16",
            "use_cache": False,
            "use_sliding_window": False,
            "vocab_size": 128256,
        },
        3_075_098_624,
    ),
}
TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _write(folder: Path, values: Any) -> Path:
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def _refused(key: str, message: str, values: dict[str, Any]) -> None:
    with pytest.raises(ArchError, match=message) as caught:
        config_from_dict(values)
    assert caught.value.key == key


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_build_with_their_parameter_counts(name, tmp_path) -> None:
    values, num_params = PUBLISHED[name]
    config = read_config(_write(tmp_path, values))
    with torch.device("meta"):
        model = build_model(config, seq_len=4096, attn="varlen", dtype=torch.bfloat16)
    assert model.count_parameters().num_params == num_params
    assert config.rope_parameters["rope_theta"] == values["rope_theta"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_survive_the_way_through_json(name) -> None:
    config = config_from_dict(PUBLISHED[name][0])
    values = config_to_dict(config)
    restored = config_from_dict(json.loads(json.dumps(values)))
    assert restored == config and restored.to_dict() == config.to_dict()
    assert config_to_dict(restored) == values
    assert "transformers_version" not in values and config.dtype == torch.bfloat16


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_new_and_old_spellings_give_the_same_config(model_type) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    old = {**TINY, "rope_theta": 5e5, "rope_scaling": rope, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5}
    new = {**TINY, "rope_parameters": {**rope, "rope_theta": 5e5}, "dtype": "bfloat16", "rms_norm_eps": 1e-5}
    first, second = (config_from_dict({**values, "model_type": model_type}) for values in (old, new))
    assert first == second and config_to_dict(first) == config_to_dict(second)
    assert first.rope_parameters == {**rope, "rope_theta": 5e5}
    assert old["rope_scaling"] == rope and "rope_theta" not in rope  # what was given is not written to


def test_a_folder_cannot_name_code_to_run(tmp_path) -> None:
    """`auto_map` and a planted module are not looked at: the class comes from our own table."""
    (tmp_path / "planted.py").write_text("raise SystemExit('this ran')\n")
    config = read_config(_write(tmp_path, {**TINY, "auto_map": {"AutoConfig": "planted.Planted"}, "extra": [1]}))
    assert type(config).__name__ == "LlamaConfig" and config.hidden_size == 32
    assert not hasattr(config, "auto_map") and not hasattr(config, "extra")


def test_a_file_that_is_no_config_is_named(tmp_path) -> None:
    path = tmp_path / "config.json"
    for values, message in (
        (None, "does not exist"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1]", "holds no JSON object"),
        ({}, "None is unknown"),
        ({"model_type": "lama"}, "did you mean llama"),
        ({"model_type": ["llama"]}, "is unknown"),
        ({**TINY, "quantization_config": {"bits": 4}}, "quantised weights"),
        ({**TINY, "hidden_size": "wide"}, "expected int, got str"),
    ):
        if values is not None:
            _write(tmp_path, values)
        with pytest.raises(ArchError, match=message) as caught:
            read_config(tmp_path)
        assert str(path) in str(caught.value)
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(ArchError, match="is not valid JSON"):
        read_config(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ArchError, match="cannot be read: Is a directory"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("key", "message", "values"),
    [
        ("dtype", "'float99' is not one of float16", {"torch_dtype": "float99"}),
        ("partial_rotary_factor", "only 1", {"partial_rotary_factor": 0.5}),
        ("num_hidden_layers", "at most 4096", {"num_hidden_layers": 10**9}),
        ("hidden_size", "at most", {"hidden_size": 2**62}),
        ("head_dim", "a whole number", {"model_type": "qwen2", "head_dim": 8.0}),
        ("attention_bias", "mistral has no such field", {"model_type": "mistral", "attention_bias": True}),
        ("mlp_bias", "qwen3 has no such field", {"model_type": "qwen3", "mlp_bias": True}),
        ("sliding_window", "llama has no such field", {"sliding_window": 4096}),
        ("layer_types", "not all", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("final_logit_softcapping", "would change the computation", {"final_logit_softcapping": 30.0}),
        ("residual_multiplier", "would change the computation", {"residual_multiplier": 0.22}),
        ("is_encoder_decoder", "only decoders", {"is_encoder_decoder": True}),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(key, message, values) -> None:
    _refused(key, message, {**TINY, **values})


def test_foreign_keys_that_are_off_are_accepted() -> None:
    off = {"attention_bias": False, "mlp_bias": None, "residual_multiplier": 1.0, "quantization_config": None}
    config_from_dict({**TINY, "model_type": "mistral", **off, "layer_types": ["full_attention"] * 2})
    config_from_dict({**TINY, "sliding_window": 8, "use_sliding_window": False, "partial_rotary_factor": 1.0})


@pytest.mark.parametrize("name", PUBLISHED)
def test_shortening_keeps_the_first_layers(name) -> None:
    config = config_from_dict(PUBLISHED[name][0])
    short = shorten(config, 5)
    expected = config_to_dict(config) | {"num_hidden_layers": 5}
    for key in ("layer_types", "no_rope_layers"):
        if key in expected:
            expected[key] = expected[key][:5]
    assert config_to_dict(short) == expected
    with torch.device("meta"):
        assert len(build_model(short, seq_len=128, attn="sdpa", dtype=torch.float32).blocks) == 5
    for wrong in (0, config.num_hidden_layers + 1):
        with pytest.raises(ArchError, match=f"cannot keep {wrong} of"):
            shorten(config, wrong)


MODEL_TYPES = sorted(CONFIG_CLASSES)
ODD_KEYS = ["quantization_config", "torch_dtype", "partial_rotary_factor", "per_layer_config", "to_dict", "num_labels"]
ODD_KEYS += ["_attn_implementation", "attn_implementation", "sub_configs", "no_rope_layers", "layer_types"]
KEYS = sorted(set().union(*map(known_fields, CONFIG_CLASSES.values()), ODD_KEYS))
ROPE_TABLES = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "llama3", "yarn", "dynamic", "longrope", 3, [1]])},
    optional={
        name: st.sampled_from([None, 0, 1, 2.0, -1, 64, 10**400, float("nan"), "x", [], {}])
        for name in ("factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor", "beta_fast")
    },
)
LEAVES = [None, 0, -1, 1, 2, 3, 2**40, 10**400, 1e30, -0.5, float("nan"), float("inf"), True, False, "", "x", "silu"]
VALUES = st.sampled_from([*LEAVES, [], [1], ["full_attention"], ["sliding_attention"] * 2, {}, {"a": 1}]) | ROPE_TABLES


@given(st.sampled_from(MODEL_TYPES), st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_any_config_builds_and_is_restored_or_is_refused_with_a_message(model_type, changes) -> None:
    values = {**TINY, "model_type": model_type, "rope_theta": 1e4, **changes}
    try:
        config = config_from_dict(values)
        with torch.device("meta"):
            build_model(config, seq_len=16, attn="sdpa", dtype=torch.float32)
    except ArchError as error:
        assert error.message
        return
    stored = json.dumps(config_to_dict(config))
    assert json.dumps(config_to_dict(config_from_dict(json.loads(stored)))) == stored


def test_a_folder_of_adapters_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ArchError, match="holds adapters of peft and no model: merge them"):
        read_config(tmp_path)
