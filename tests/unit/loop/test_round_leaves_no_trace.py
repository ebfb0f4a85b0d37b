"""Training goes on after a round of validation as if there had been none."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from configs.sft import SFTConfig
from trainer.run import Run, StopSignal
from trainer.train import Trainer

ARCH = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
STEPS = 4


class Load(nn.Module):
    """A part of a model that counts the tokens it is trained on, as the balancing of experts does. It counts the
    others apart, to show that a round came through here."""

    training_tokens: Tensor
    other_tokens: Tensor

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        for name in ("training_tokens", "other_tokens"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        (self.training_tokens if self.training else self.other_tokens).add_(hidden.shape[:-1].numel())
        return self.layer(hidden)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


def train(folder: Path, tokenizer: Path, val: dict[str, Any] | None) -> tuple[list[dict[str, Any]], Load]:
    """The records of a run of a few steps, and what its first MLP counted."""
    values = {
        "model": {"arch": ARCH, "init": {}, "compute_dtype": "float32"},
        "tokenizer": {"name": str(tokenizer)},
        "data": {"type": "fake", "seq_len": 16, "batch_size": 4, "micro_batch_size": 2, "num_rows": 64},
        "val": val,
        "log": {"checksum_interval": 1},
        "max_steps": STEPS,
        "output_dir": str(folder),
        "run": {"name": "run"},
    }
    (folder / "run").mkdir(parents=True)
    trainer = Trainer(SFTConfig.model_validate(values), Run(dir=folder / "run", attempt=0, stop=StopSignal()))
    load = first_mlp_counted(trainer.model)
    trainer.run()
    trainer.close()
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()], load


def first_mlp_counted(model: nn.Module) -> Load:
    parent, name, layer = next(find_mlps(model))
    load = Load(layer)
    setattr(parent, name, load)
    return load


def find_mlps(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if name == "mlp":
                yield parent, name, child


def test_steps_after_a_round_are_bit_equal(tmp_path: Path, tiny_tokenizer: Path, tiny_heldout: Path) -> None:
    """Field case R99: with a round before every step, rows, loss, gradient and weights are those of a run without; what
    counts tokens of training counts none of a round."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"context": "ba ko", "continuation": " ko ba"}) + "\n")
    sets = [{"name": "heldout", "path": str(tiny_heldout)}, {"name": "lines", "path": str(lines)}]
    val = {"interval": 1, "eval_on_start": True, "sets": sets, "seq_lens": [16, 32], "micro_batch_tokens": 64}
    plain, plain_load = train(tmp_path / "plain", tiny_tokenizer, None)
    scored, scored_load = train(tmp_path / "scored", tiny_tokenizer, val)

    assert [record["step"] for record in plain] == [record["step"] for record in scored] == list(range(STEPS + 1))
    for name in ("digest/params", "digest/rows", "loss/mean", "optim/grad_norm"):
        values = [record[name] for record in plain[1:]]
        assert values == [record[name] for record in scored[1:]]
        assert len(set(values)) == STEPS, name
    losses = [record["val/heldout/loss@32"] for record in scored]
    assert len(set(losses)) == STEPS + 1, "each round scored other weights"
    assert plain_load.training_tokens == scored_load.training_tokens == STEPS * 4 * 16
    assert plain_load.other_tokens == 0
    assert scored_load.other_tokens > 0
