"""Made-up conversations of every kind that templates tell apart, and small tokenizers with a family's control tokens.

Loaded by the fixture `made_chats`.
"""

import random
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trainer.data.chat.read.conversation import LossRules, read_conversation
from trainer.data.chat.sample import Conversation

BOS, EOS = "<s>", "</s>"
PLAIN_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added to vocabularies as ordinary text: special = False."""

_WORDS = (
    *("the", "a", "of", "sum", "red", "river", "counts", "slowly", "under", "it's", "'so'", "42", "x=1"),
    *('"quoted"', "<b>tag</b>", "über", "naïve", "東京", "🐕", "\\n"),
)
_ENDS = ("", "", "", ".", "?", "\n", " ", "\n\nSecond paragraph.", "\n- one\n- two\n")
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Says what {name} is, é <1>.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "what"}}},
        },
    }
    for name in ("look_up", "add_all")
]


def make_chats(count: int, seed: int = 0) -> list[Conversation]:
    """Conversations of several turns, some with a system message, tools, reasoning, empty or null contents. All
    assistant messages carry loss."""
    generator = random.Random(seed)
    chats = []
    for _ in range(count):
        row = _make_row(generator)
        rules = LossRules(roles=frozenset({"assistant"}), last_turn_only=False)
        chat = read_conversation(row, rules)
        trains = [message["role"] == "assistant" for message in chat.messages]
        chats.append(Conversation(messages=chat.messages, tools=chat.tools, trains=trains))
    return chats


def _make_row(generator: random.Random) -> dict[str, Any]:
    with_tools, with_reasoning = generator.random() < 0.25, generator.random() < 0.25
    messages: list[dict[str, Any]] = []
    if generator.random() < 0.4:
        messages.append({"role": "system", "content": _text(generator)})
    for _ in range(generator.randint(1, 4)):
        messages.append({"role": "user", "content": _text(generator)})
        if with_tools and generator.random() < 0.7:
            for _ in range(generator.randint(1, 2)):
                messages += _tool_use(generator, with_reasoning)
        messages.append(_answer(generator, with_reasoning))
    if all(message.get("content") in ("", None) for message in messages if message["role"] == "assistant"):
        messages[-1]["content"] = "something"
    return {"messages": messages, "tools": _TOOLS if with_tools else None}


def _answer(generator: random.Random, with_reasoning: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text(generator)}
    if generator.random() < 0.06:
        message["content"] = generator.choice(["", None])
    if with_reasoning and generator.random() < 0.7:
        message["reasoning_content"] = _text(generator)
    elif with_reasoning and generator.random() < 0.5:
        message["content"] = f"<think>\n{_text(generator)}\n</think>\n\n{_text(generator)}"
    return message


def _tool_use(generator: random.Random, with_reasoning: bool) -> list[dict[str, Any]]:
    count = generator.choice([1, 1, 1, 2])
    calls = []
    for number in range(count):
        arguments = {"x": _text(generator), "n": generator.choice([1, 2.5, True, ["a", "b"], {"deep": "é"}])}
        function = {"name": generator.choice(_TOOLS)["function"]["name"], "arguments": arguments}
        calls.append({"id": f"call{number:05}", "type": "function", "function": function})
    asks: dict[str, Any] = {"role": "assistant", "content": generator.choice([None, "", "Let me look."])}
    asks["tool_calls"] = calls
    if with_reasoning and generator.random() < 0.5:
        asks["reasoning_content"] = _text(generator)
    results = [
        {"role": "tool", "content": _text(generator), "tool_call_id": call["id"], "name": call["function"]["name"]}
        for call in calls
    ]
    return [asks, *results]


def _text(generator: random.Random) -> str:
    words = " ".join(generator.choices(_WORDS, k=generator.randint(1, 12)))
    return generator.choice(["", "", "", " ", "\n"]) + words + generator.choice(_ENDS)


@cache
def _trained() -> str:
    """A byte-level BPE tokenizer of 400 tokens, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    texts = [message["content"] for chat in make_chats(50, seed=7) for message in chat.messages]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def make_tokenizer(template: str | None, control: Iterable[str]) -> PreTrainedTokenizerFast:
    """A small tokenizer with these control tokens, BOS `<s>` and EOS `</s>`."""
    tokenizer = Tokenizer.from_str(_trained())
    tokens = sorted({BOS, EOS, *control})
    plain = [token for token in PLAIN_TOKENS if token not in tokens]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    made.chat_template = template
    return made


_OTHER_FORMS = (
    r"<(?:start|end)_of_\w+>|<turn\|>|<\|turn>|<channel\|>|<\|channel>|<\|tool_\w+>|<tool_\w+\|>|<\|think\|>|"
    r"\[gMASK\]|<sop>|\[/?[A-Z_]+\]|<image>"
)


def control_tokens(template: str) -> set[str]:
    """What looks like a control token in a template's source."""
    bar = r"|\uff5c"  # DeepSeek's is the wide one
    return set(re.findall(rf"<[{bar}][^<>\s{bar}]+[{bar}]>|{_OTHER_FORMS}", template))
