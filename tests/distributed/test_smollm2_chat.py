"""A real model fine-tuned on a hundred chats by the real command, exported, and asked in transformers."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

COMMAND = [str(Path(sys.executable).with_name("sft"))]

CONFIG = """
max_steps = 20
output_dir = "{output_dir}"
[run]
name = "chat"
[model]
name = "{model}"
compute_dtype = "float32"
[data]
name = "{chats}"
seq_len = 64
batch_size = 1
[optim]
lr = 2e-5
[ckpt]
weights = true
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Deleted at the end: pytest would keep 2 GB of checkpoints for three sessions."""
    yield tmp_path
    shutil.rmtree(tmp_path / "outputs")


def _chat(a: int, b: int) -> list[dict[str, str]]:
    """Words of their own for a sum, so that what was learned can be told from what was known."""
    return [
        {"role": "system", "content": "Sums."},
        {"role": "user", "content": f"{a} and {b}"},
        {"role": "assistant", "content": f"Together they make {a + b}."},
    ]


def test_a_hundred_chats_teach_a_real_model_to_answer_in_their_words(smollm2_folder: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chats = folder / "chats.jsonl"
    lines = [json.dumps({"messages": _chat(a, b)}) + "\n" for a in range(10) for b in range(10)]
    chats.write_text("".join(lines))
    toml = folder / "chat.toml"
    toml.write_text(CONFIG.format(output_dir=folder / "outputs", model=smollm2_folder, chats=chats))
    done = subprocess.run([*COMMAND, "@", str(toml)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100 samples of 100 conversations" in done.stdout + done.stderr

    run_dir = folder / "outputs" / "chat"
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss/mean"] for record in records if record["step"] and "loss/mean" in record]
    assert len(losses) == 20
    assert losses[0] < 5.0, "with drawn weights it would be ln 49152 = 10.8"
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5])

    exported = run_dir / "weights" / "step_20"
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    prompt = tokenizer.apply_chat_template(_chat(12, 5)[:2], add_generation_prompt=True, return_dict=False)
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    assert tokenizer.decode(answer).startswith("Together they make ")
    assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>"), "it ends its turn"
