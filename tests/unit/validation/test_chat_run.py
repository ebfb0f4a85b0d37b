"""Conversations in a run of this process: what is counted, and what `val.data` scores."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.sft import SFTConfig
from trainer.run import Run, StopSignal
from trainer.train import Trainer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
"""Three letters of a user and two of an assistant are 3 tokens without loss and 3 with."""

ARCH = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def train(
    tmp_path: Path, byte_chat_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[dict[str, Any]]]:
    """train(data={...}, val={...}): a run in fp32; its records, from that of step 0 on. `chats.jsonl` has 8 rows."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    Path("plain.jinja").write_text(TEMPLATE)
    chats = [
        {"messages": [{"role": "user", "content": f"ab{number}"}, {"role": "assistant", "content": f"{number}c"}]}
        for number in range(8)
    ]
    Path("chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))

    def run(data: dict[str, Any], val: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        config = SFTConfig.model_validate(
            {
                "max_steps": 2,
                "model": {"arch": ARCH, "init": {"std": 0.5}, "compute_dtype": "float32"},
                "tokenizer": {"name": str(byte_chat_tokenizer)},
                "renderer": {"template": "plain.jinja"},
                "data": {"seq_len": 10, "num_workers": 0} | data,
                "val": val,
                "run": {"name": "run"},
            }
        )
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        trainer = Trainer(config, Run(dir=run_dir, attempt=0, stop=StopSignal()))
        try:
            trainer.run()
        finally:
            trainer.close()
        return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]

    return run


CHATS = {"type": "sft", "name": "chats.jsonl", "cache_workers": 1, "packing": "none"}


def test_what_counts_as_a_token(train: Callable[..., list[dict[str, Any]]]) -> None:
    """Field case R107: rows of 40 % padding and 30 % prompt: all positions, padding and loss tokens are each exact."""
    records = train(CHATS | {"batch_size": 4, "micro_batch_size": 2})
    for step in (1, 2):
        (record,) = [record for record in records if record["step"] == step]
        counted = {name: record[f"progress/{name}"] for name in ("num_samples", "num_tokens", "num_padding_tokens")}
        assert counted == {"num_samples": 4 * step, "num_tokens": 40 * step, "num_padding_tokens": 16 * step}
        assert record["progress/num_loss_tokens"] == 12 * step
        throughput = record["perf/throughput"] * record["time/step"]
        assert throughput == pytest.approx(24), "positions without padding"


def test_the_loss_before_a_step_is_that_of_its_rows(train: Callable[..., list[dict[str, Any]]]) -> None:
    """Training and validation score the same conversations alike: one step reads them all, packed otherwise."""
    val = {"eval_on_start": True, "data": {"name": "chats.jsonl", "seq_len": 13, "micro_batch_size": 3}}
    records = train(CHATS | {"batch_size": 8, "micro_batch_size": 4}, val)
    assert records[0]["step"] == 0
    assert records[0]["val/loss"] == pytest.approx(records[1]["loss/mean"], rel=1e-6)
    assert records[0]["val/perplexity"] == pytest.approx(records[1]["loss/perplexity"], rel=1e-5)
    assert records[0]["time/val"] > 0


def test_chats_beside_another_type_of_data(train: Callable[..., list[dict[str, Any]]]) -> None:
    """A pretraining run watches conversations; sets are not needed for it."""
    val = {"interval": 1, "data": {"name": "chats.jsonl", "seq_len": 32}}
    records = train({"type": "fake", "batch_size": 2, "num_rows": 8}, val)
    losses = [record["val/loss"] for record in records if "val/loss" in record]
    assert len(losses) == 2
    assert losses[0] != losses[1], "the live weights"
