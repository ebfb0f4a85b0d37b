"""The example configs resolve, and describe the models they say they do; that of `tokenize` is tested elsewhere."""

import json
import sys
from pathlib import Path

import pytest
import torch

from configs.cli import resolve
from models.registry import build_config, build_model

ROOT = Path(__file__).parents[2]
TOKENIZE = Path("examples/quickstart/tokenize.toml")
EXAMPLES = sorted({path.relative_to(ROOT) for path in (ROOT / "examples").rglob("*.toml")} - {TOKENIZE})

PARAMETERS = {"125m.toml": (120e6, 130e6), "1b.toml": (1.2e9, 1.25e9), "pretrain.toml": (3e6, 3.5e6)}


@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_example(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    here = ["--data.paths", "examples/quickstart/train", "--tokenizer.name", "examples/quickstart/tokenizer"]
    held_out = json.dumps([{"name": "heldout", "path": "examples/quickstart/heldout"}])
    config = resolve(["@", str(path), *here, "--val.sets", held_out]).config
    assert config.model.arch is not None
    with torch.device("meta"):
        model = build_model(
            build_config(config.model.arch, tokenizer_length=4096, special_ids={}),
            seq_len=config.data.seq_len,
            attn="sdpa",
            dtype=torch.float32,
        )
    least, most = PARAMETERS[path.name]
    assert least < model.count_parameters().num_params < most


def test_no_script_hides_a_module_of_the_standard_library() -> None:
    """The folder of a script comes first on its import path, so `benchmarks/tokenize.py` would break all beside it."""
    scripts = [path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert len(scripts) >= 5
    assert [str(path) for path in scripts if path.stem in sys.stdlib_module_names] == []
