"""Which models can share their rows between how many ranks, and what is said where they cannot."""

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.errors import ConfigError
from configs.sft import SFTConfig
from models.errors import ArchError
from models.layers.context_parallel.ulysses import heads_fit
from models.registry import build_config, build_model
from trainer.preflight import preflight

SIZES = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fitting"),
    [
        (8, 8, [1, 2, 4, 8]),
        (8, 2, [1, 2, 4, 8]),
        (8, 1, [1, 2, 4, 8]),
        (12, 6, [1, 2, 3, 6, 12]),
        (12, 4, [1, 2, 4, 12]),
        (9, 3, [1, 3, 9]),
    ],
)
def test_numbers_of_ranks_that_heads_fit(heads: int, kv_heads: int, fitting: list[int]) -> None:
    """Whole query heads for each rank, and as many query heads for each of a rank's key-value heads."""
    assert [ranks for ranks in range(1, 20) if heads_fit(heads, kv_heads, ranks)] == fitting


def test_a_network_of_transformers_is_refused() -> None:
    config = build_config(
        {"model_type": "llama", "num_attention_heads": 4, **SIZES}, tokenizer_length=None, special_ids={}
    )
    with torch.device("meta"):
        model = build_model(config, seq_len=8, attn="sdpa", dtype=torch.float32, impl="hf")
    with pytest.raises(ArchError, match="this network sees whole rows; only those implemented here can share them"):
        model.check_context_parallel("ring", 2)


def _config(arch: dict[str, Any], **model: Any) -> SFTConfig:
    return SFTConfig.model_validate(
        {
            "data": {"type": "fake", "seq_len": 24, "batch_size": 1},
            "model": {"arch": arch | SIZES, "init": {}} | model,
            "max_steps": 1,
            "run": {"name": "one"},
        }
    )


def _faults(config: SFTConfig, folder: Path) -> list[tuple[str, str]]:
    try:
        preflight(config, run_dir=folder, world_size=config.model.cp, say=lambda text: None)
    except ConfigError as error:
        return [(fault.key, fault.message) for fault in error.faults]
    return []


LLAMA = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2}
OLMO2 = {"model_type": "olmo2", "num_attention_heads": 6, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_config(LLAMA, cp=2), None),
        (_config(LLAMA, cp=3, cp_style="ring"), None),
        (
            _config(LLAMA, cp=4),
            "6 query heads and 2 key-value heads cannot be shared by 4 ranks; 2, 6 would work, "
            "and ring attention takes any number",
        ),
        (_config(OLMO2, cp=2), "this network sees whole rows; only those implemented here can share them"),
    ],
)
def test_preflight_says_what_cannot_be_shared(config: SFTConfig, message: str | None, tmp_path: Path) -> None:
    """Also where `model.impl = "auto"` turns out to be transformers'."""
    assert _faults(config, tmp_path) == ([] if message is None else [("model.cp", message)])
