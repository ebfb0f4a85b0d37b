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

HERE = (
    *("--data.paths", "examples/quickstart/train", "--tokenizer.name", "examples/quickstart/tokenizer"),
    *("--val.sets", json.dumps([{"name": "heldout", "path": "examples/quickstart/heldout"}])),
)
"""Data that is there, in place of what a user would have."""

TESTED_ELSEWHERE = (
    "examples/cluster/",  # below
    "examples/quickstart/tokenize.toml",
    "examples/quickstart/chat.toml",
    "examples/sft/",
    "examples/validation/",
)


@pytest.mark.parametrize("path, bounds", EXAMPLES.items(), ids=str)
def test_example(path: str, bounds: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = resolve(["@", path, *HERE]).config
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


@pytest.mark.parametrize(
    ("overlays", "ranks", "cp", "flags"),
    [
        (["one_node.toml"], 8, 1, []),
        (["nodes.toml"], 32, 1, ["--data.micro-batch-size", "4"]),
        (["nodes.toml", "long_rows.toml"], 32, 4, []),
        (["one_node.toml", "resume.toml"], 8, 1, []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_overlays_of_a_cluster(
    overlays: list[str], ranks: int, cp: int, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Laid over a config as their first lines say."""
    monkeypatch.chdir(ROOT)
    layers = [word for name in overlays for word in ("@", f"examples/cluster/{name}")]
    config = resolve(["@", "examples/pretrain/1b.toml", *layers, *flags, *HERE]).config
    assert config.slurm is not None
    assert (config.ranks, config.model.cp, config.slurm.requeue) == (ranks, cp, True)
    assert (config.resume is not None) == ("resume.toml" in overlays)


def test_every_example_is_tested() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.toml")}
    assert {path for path in found if not path.startswith(TESTED_ELSEWHERE)} == EXAMPLES.keys()


def test_no_script_hides_a_module_of_the_standard_library() -> None:
    """The folder of a script comes first on its import path, so `benchmarks/tokenize.py` would break all beside it."""
    scripts = [path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert len(scripts) >= 5
    assert [str(path) for path in scripts if path.stem in sys.stdlib_module_names] == []
