"""Writes the chats of the quickstart: lists of words, answered backwards. And a tokenizer that can write chats.

    uv run python examples/quickstart/chats.py

`outputs/chats/train.jsonl` and `heldout.jsonl` hold one conversation a line; no held-out prompt is in the training
chats. The same files come every time. `outputs/chats/tokenizer` is the quickstart's tokenizer with the two control
tokens of ChatML and its template.
"""

import argparse
import json
import random
from pathlib import Path

from transformers import AutoTokenizer

TOKENIZER = Path(__file__).parent / "tokenizer"
NUM_TRAIN, NUM_HELD_OUT = 12_000, 200
MIN_WORDS, MAX_WORDS = 2, 4

# Each is one token, at the beginning of an answer and after a space.
_LINES = """
    python module class object string number list file path name value type error code text line
    data test time date size item index count state process thread server client request response message
    header field option command parser token buffer stream socket address host port user order action policy
    table group level format version system source target parent child node tree stack queue map filter
"""
WORDS = _LINES.split()

TEMPLATE = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""".strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/chats"))
    out: Path = parser.parse_args().out

    prompts = draw_prompts(NUM_TRAIN + NUM_HELD_OUT)
    write_chats(out / "heldout.jsonl", prompts[:NUM_HELD_OUT])
    write_chats(out / "train.jsonl", prompts[NUM_HELD_OUT:])
    write_tokenizer(out / "tokenizer")
    print(f"{out}: {NUM_TRAIN} chats to train on, {NUM_HELD_OUT} held out, and a tokenizer for them")


def draw_prompts(count: int) -> list[list[str]]:
    """Lists of words, all different."""
    generator = random.Random(0)
    prompts: dict[tuple[str, ...], None] = {}
    while len(prompts) < count:
        prompts[tuple(generator.choice(WORDS) for _ in range(generator.randint(MIN_WORDS, MAX_WORDS)))] = None
    drawn = [list(prompt) for prompt in prompts]
    generator.shuffle(drawn)  # short lists are soon all drawn, so the later ones are longer
    return drawn


def write_chats(path: Path, prompts: list[list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for words in prompts:
            question = {"role": "user", "content": "Reverse: " + " ".join(words)}
            answer = {"role": "assistant", "content": " ".join(reversed(words))}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")


def write_tokenizer(folder: Path) -> None:
    """The ids of the text stay what they are. Two more come behind, for which the model gets rows when it starts."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
