"""How many of the held-out chats a run answers word for word, before its first step and after its last, on the CPU.

    uv run python examples/quickstart/score.py outputs/quickstart-chat

Each prompt is written by the tokenizer's chat template and answered with the most likely tokens.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.errors import ConfigError
from configs.sft import SFTConfig
from models.base import CausalLM
from models.batch import IGNORE_INDEX
from models.hf_config import config_from_dict
from models.registry import build_model
from trainer.checkpoint import ModelRecord, find_checkpoint, read_state
from trainer.checkpoint.as_model import open_model
from trainer.data.collate import collate
from trainer.data.row import Rows
from trainer.errors import RunError
from trainer.tokenizer import load_tokenizer
from trainer.weights.load import load_weights

PROMPTS_AT_ONCE = 50
MAX_NEW_TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--chats", type=Path, default=Path("outputs/chats/heldout.jsonl"))
    arguments = parser.parse_args()

    config_file = arguments.run_dir / "configs" / "sft.json"
    if not config_file.is_file():
        parser.error(f"{arguments.run_dir} is not a run directory: it has no configs/sft.json")
    config = SFTConfig.model_validate_json(config_file.read_text())
    if config.model.name is None or config.tokenizer_name is None:
        parser.error(f"{arguments.run_dir} did not start from the weights of a model")
    chats = [json.loads(line)["messages"] for line in arguments.chats.read_text(encoding="utf-8").splitlines()]
    try:
        tokenizer = load_tokenizer(config.tokenizer_name)
        after = find_checkpoint(arguments.run_dir, None, print, repair=False)
        record = ModelRecord.of(read_state(after))
        for title, weights in (("before", Path(config.model.name)), ("after", after)):
            model = load_model(record, weights, config.data.seq_len)
            answers = answer(model, tokenizer, [messages[:-1] for messages in chats])
            right = sum(given == messages[-1]["content"] for given, messages in zip(answers, chats, strict=True))
            print(f"{title:6} {weights}: {right} of {len(chats)} word for word ({right / len(chats):.1%})")
            print(f"       {chats[0][-2]['content']!r} -> {answers[0]!r}")
    except (ConfigError, RunError) as error:
        raise SystemExit(str(error)) from error


def load_model(record: ModelRecord, weights: Path, seq_len: int) -> CausalLM:
    """The run's model in fp32 with the weights of a checkpoint or a Hugging Face folder, as a run starts from them."""
    model = build_model(config_from_dict(record.config), seq_len=seq_len, attn="sdpa", dtype=torch.float32)
    load_weights(
        weights,
        {name: parameter.detach() for name, parameter in model.named_parameters()},
        tied=model.tied_names,
        show_progress=False,
        vocabulary=model.vocabulary_names,
        open_files=open_model,
    )
    return model


def answer(model: CausalLM, tokenizer: Any, prompts: list[list[dict[str, str]]]) -> list[str]:
    """What the model says to each prompt, control tokens left out."""
    answers = []
    for start in range(0, len(prompts), PROMPTS_AT_ONCE):
        part = prompts[start : start + PROMPTS_AT_ONCE]
        ids = tokenizer.apply_chat_template(part, add_generation_prompt=True, return_dict=False)
        answers += [
            tokenizer.decode(new, skip_special_tokens=True)
            for new in complete(model, ids, eos_token_id=tokenizer.eos_token_id)
        ]
    return answers


@torch.no_grad()
def complete(model: CausalLM, prompts: list[list[int]], *, eos_token_id: int) -> list[list[int]]:
    """The most likely tokens after each prompt, up to EOS or MAX_NEW_TOKENS."""
    texts = [list(prompt) for prompt in prompts]
    open_texts = list(range(len(texts)))
    for _ in range(MAX_NEW_TOKENS):
        likely = next_ids(model, [texts[i] for i in open_texts])
        for i, token in zip(open_texts, likely, strict=True):
            texts[i].append(token)
        open_texts = [i for i in open_texts if texts[i][-1] != eos_token_id]
        if not open_texts:
            break
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def next_ids(model: CausalLM, texts: list[list[int]]) -> list[int]:
    """The most likely token after each text; all go through the model together, each a row with padding behind."""
    longest = max(map(len, texts))
    rows = Rows.empty(len(texts), longest)
    rows.input_ids.fill(0)
    rows.labels.fill(IGNORE_INDEX)
    for i, text in enumerate(texts):
        rows.input_ids[i, : len(text)] = text
        lengths = [len(text), longest - len(text)]
        rows.segment_lengths[i] = np.array([length for length in lengths if length], np.int64)
    logits = model.logits(collate(rows, full_rows=False, pin_memory=False))
    return [int(logits[i, len(text) - 1].argmax()) for i, text in enumerate(texts)]


if __name__ == "__main__":
    main()
