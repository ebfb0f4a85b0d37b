"""The templates for real models in examples/sft: every check before the start, on small stand-ins in their places."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from transformers import AutoTokenizer, Qwen3Config

from configs.cli import resolve
from configs.sft import SFTConfig
from models.registry import build_model
from trainer.preflight import preflight

EXAMPLES = Path(__file__).parents[3] / "examples" / "sft"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture
def stand_ins(tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with small models under the names of the large ones, and a few chats."""
    import torch

    monkeypatch.chdir(tmp_path)
    config = Qwen3Config(
        vocab_size=384,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        eos_token_id=0,
    )
    model = build_model(config, seq_len=64, attn="sdpa", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"):
        folder = Path(name)
        folder.mkdir(parents=True)
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        save_file(
            {key: value.detach().clone() for key, value in model.state_dict().items()}, folder / "model.safetensors"
        )
    Path("data/chats").mkdir(parents=True)
    for name in ("train", "heldout"):
        turns = [{"role": "user", "content": "ba ko"}, {"role": "assistant", "content": "ko ba"}]
        lines = [json.dumps({"messages": turns}) + "\n"] * 8
        Path(f"data/chats/{name}.jsonl").write_text("".join(lines))


def test_there_are_examples() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.toml")) == ["0.6b", "8b", "8b-lora"]


@pytest.mark.parametrize(("name", "world_size", "accumulation"), [("0.6b", 8, 1), ("8b", 8, 8), ("8b-lora", 1, 16)])
def test_each_passes_the_checks(stand_ins: None, name: str, world_size: int, accumulation: int) -> None:
    config = resolve(
        ["@", str(EXAMPLES / f"{name}.toml"), "--data.cache-workers", "1", "--val.data.cache-workers", "1"]
    ).config
    assert isinstance(config, SFTConfig)
    assert config.run.name == f"sft-{name}"
    assert (config.model.lora is not None) == name.endswith("lora")
    plan = preflight(config, run_dir=Path("outputs") / name, world_size=world_size, say=print)
    assert (plan.steps, plan.grad_accum_steps) == (1000, accumulation)
