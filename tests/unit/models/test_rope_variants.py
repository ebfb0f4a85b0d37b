"""RoPE frequencies of published settings against transformers' formulas, and against pinned values."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.layers.rope import YarnScaling, rope_frequencies, rope_table
from models.layers.rope_config import rope_of_config

CPU = torch.device("cpu")
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama 3.1": (128, {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5}),
    "Llama 3.2": (64, {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5}),
    "Qwen2.5": (
        128,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6},
    ),
    "Vicuna 16k": (128, {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
    "DeepSeek V3": (
        64,
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "rope_theta": 1e4,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
}


def _config(head_dim: int, parameters: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        head_dim=head_dim, hidden_size=32, max_position_embeddings=131072, rope_parameters=dict(parameters)
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_equal_transformers(name) -> None:
    head_dim, parameters = PUBLISHED[name]
    config = _config(head_dim, parameters)
    rope = rope_of_config(config, head_dim)
    theirs, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, CPU)
    ours = rope_frequencies(rope, CPU)
    assert ours.dtype == torch.float64
    assert ((ours - theirs) / theirs).abs().max() < 1e-6  # theirs are fp32
    ours_factor = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    assert ours_factor == pytest.approx(attention_factor, rel=1e-12)


def test_frequencies_of_llama_3_1_at_both_ends() -> None:
    head_dim, parameters = PUBLISHED["Llama 3.1"]
    frequencies = rope_frequencies(rope_of_config(_config(head_dim, parameters), head_dim), CPU)
    assert frequencies[0] == 1.0
    assert frequencies[-1].item() == pytest.approx(5e5 ** (-126 / 128) / 8, rel=1e-14)


def test_yarn_multiplies_the_table_by_the_papers_factor() -> None:
    head_dim, parameters = PUBLISHED["Qwen2.5"]
    rope = rope_of_config(_config(head_dim, parameters), head_dim)
    cos, sin = rope_table(torch.tensor([[0, 7]]), rope, torch.float64)
    factor = 0.1 * math.log(4) + 1
    assert cos[0, 0, 0].tolist() == pytest.approx([factor] * 64, rel=1e-14)
    assert (cos**2 + sin**2).flatten().tolist() == pytest.approx([factor**2] * 128, rel=1e-12)


@pytest.mark.parametrize("name", PUBLISHED)
def test_long_positions_keep_their_phase_in_fp32(name) -> None:
    """Field case R85 for the scaled types: 1e-2 of a radian at the end of 131,072 positions, 5e-3 up to 65,536."""
    head_dim, parameters = PUBLISHED[name]
    rope = rope_of_config(_config(head_dim, parameters), head_dim)
    positions = torch.tensor([[1, 4095, 65_535, 131_071]])
    exact, rounded = (torch.stack(rope_table(positions, rope, dtype)) for dtype in (torch.float64, torch.float32))
    errors = (exact - rounded).abs().amax(dim=(0, 1, 3, 4))
    assert rounded.dtype == torch.float32
    assert errors[:3].max() < 5e-3 and errors[3] < 1e-2
