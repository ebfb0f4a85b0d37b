"""The example configs of pretraining resolve and describe the models they say they do."""

import json
import sys
from pathlib import Path

import pytest
import torch

from configs.cli import resolve
from models.registry import build_config, build_model

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "examples/pretrain/125m.toml": (120e6, 130e6),
    "examples/pretrain/1b.toml": (1.2e9, 1.25e9),
    "examples/quickstart/pretrain.toml": (3e6, 3.5e6),
}
"""Path to the least and the most parameters."""

TESTED_ELSEWHERE = (
    "examples/quickstart/tokenize.toml",
    "examples/quickstart/chat.toml",
    "examples/sft/",
    "examples/validation/",
)


@pytest.mark.parametrize("path, bounds", EXAMPLES.items(), ids=str)
def test_example(path: str, bounds: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    here = ["--data.paths", "examples/quickstart/train", "--tokenizer.name", "examples/quickstart/tokenizer"]
    held_out = json.dumps([{"name": "heldout", "path": "examples/quickstart/heldout"}])
    config = resolve(["@", path, *here, "--val.sets", held_out]).config
    assert config.model.arch is not None
    with torch.device("meta"):
        model = build_model(
            build_config(config.model.arch, tokenizer_length=4096, special_ids={}),
            seq_len=config.data.seq_len,
            attn="sdpa",
            dtype=torch.float32,
        )
    least, most = bounds
    assert least < model.count_parameters().num_params < most


def test_every_example_is_tested() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.toml")}
    assert {path for path in found if not path.startswith(TESTED_ELSEWHERE)} == EXAMPLES.keys()


def test_no_script_hides_a_module_of_the_standard_library() -> None:
    """The folder of a script comes first on its import path, so `benchmarks/tokenize.py` would break all beside it."""
    scripts = [path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert len(scripts) >= 5
    assert [str(path) for path in scripts if path.stem in sys.stdlib_module_names] == []
