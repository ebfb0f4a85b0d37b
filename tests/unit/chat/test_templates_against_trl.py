"""Vendors' chat templates, as trl carries them: our tokens are those of `apply_chat_template`, and our loss is on the
tokens that trl's twin of the template marks, on made-up conversations of every kind.

One difference is general and left out of the comparison: twins mark the line end after the token that ends a turn.
What else differs is pinned in `EXPECTED`, family by family.
"""

import datetime
import os
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import pytest

from configs.renderer import RendererConfig
from trainer.data.chat.encode.encoder import Encoder
from trainer.data.chat.render.renderer import Renderer
from trainer.data.chat.sample import Conversation, Rendered, Sample, UnusableError
from trainer.data.errors import DataError

trl = pytest.importorskip("trl", reason="trl, whose templates these tests take, is not installed")

FOLDER = Path(trl.__file__).parent / "chat_templates"
SLOW = os.environ.get("ONELOOP_SLOW") == "1"
COUNT = 500 if SLOW else 40
DAY = datetime.date(2026, 11, 5)

# Reasons of refusals, by a part of the message.
REASONS = {
    "the template leaves out its reasoning, though": "reasoning of the last turn left out",
    "the template leaves out its reasoning;": "no place for reasoning",
    "the template leaves out the tool calls": "no place for tool calls",
    "the template leaves out the tools": "no place for tools",
    "the template leaves out this message": "a message left out",
    "the template ends it with no control token": "no end of turn",
    "cannot be found exactly in the text": "inexact",
    "can only concatenate str": "fails on arguments as tables",
    "'str object' has no attribute 'text'": "wants contents as lists of parts",
    "str object has no element 0": "wants contents as lists of parts",
}
HEADERS = {"deepseek": "<\uff5cAssistant\uff5c>", "harmony": "<|start|>assistant"}

PREFIX = "loss by strict prefix rendering, else by the rounds of the template's loop over messages"
OWN = "loss by the template's own marks"
SHIPPED = "loss by the marks of the shipped template "

_PLAIN = {"refused: no place for reasoning": 8, "refused: no place for tools": 1}
_NO_CALLS = {"refused: no place for tool calls": 6}
_GEMMA_4 = {"refused: inexact": 1, "refused: reasoning of the last turn left out": 9, "same tokens": 30}
_NEMOTRON = {"same": 29, "the twin has ['<think>\\n']": 11}
_QWEN_3_5 = {
    "the twin has ['<think>', '<think>\\n']": 0,
    "the twin has ['<think>']": 8,
    "the twin has ['<think>\\n']": 5,
    "the twin writes more reasoning": 27,
}
_LLAMA_3_1 = {
    "refused: a message left out": 0,
    "refused: no place for reasoning": 8,
    "same tokens": 27,
    "unusable": 5,
}
_VISION = {"refused: a message left out": 28, "refused: wants contents as lists of parts": 12}

# How loss is found, and what becomes of the 40 conversations (0: of none of them, but of some of 500). Where the twin
# has more than we:
# - a header, or a part of it: qwen2_5's twin marks the line end of the header, those of DeepSeek, gptoss and
#   muse_glimmer the whole header. A model is prompted with it.
# - a start of reasoning (`<think>\n`) that is a part of the generation prompt, by default or with reasoning off.
# - more reasoning: twins of Qwen 3 to 3.6 and R1 write what the original leaves out of the history, so their text is
#   not that of the tokenizer. What both say besides is compared.
# - diffusion_gemma lacks `<|tool_response>`: after it results of tools are read, so it ends the turn.
# What is refused says so for the vendor's template as it is: it leaves out what the row has, has no end of turn
# (glm4moe's twin adds one), renders contents as lists of parts only (idefics3, llava_next, smolvlm), or writes several
# messages in one round of its loop and otherwise once others follow (tools in gemma4). gptoss writes the first call of
# a message alone.
EXPECTED: dict[str, tuple[str, dict[str, int]]] = {
    "cohere": (PREFIX, {**_PLAIN, "same": 25, "unusable": 6}),
    "cohere2": (PREFIX, {**_PLAIN, "same": 25, "unusable": 6}),
    "deepseek_r1_distill": (
        PREFIX,
        {**_PLAIN, **_NO_CALLS, f"the twin has {[HEADERS['deepseek']]}": 24, "the twin writes more reasoning": 1},
    ),
    "deepseekv3": (
        PREFIX,
        {**_PLAIN, "refused: fails on arguments as tables": 6, f"the twin has {[HEADERS['deepseek']]}": 25},
    ),
    "diffusion_gemma": (PREFIX, {"refused: inexact": 3, "same": 34, "the twin lacks ['<|tool_response>']": 3}),
    "gemma": (
        SHIPPED + "gemma",
        {"refused: no place for reasoning": 4, "refused: no place for tools": 0, "same": 15, "unusable": 21},
    ),
    "gemma3": (SHIPPED + "gemma", {**_PLAIN, "same": 25, "unusable": 6}),
    "gemma4": (PREFIX, _GEMMA_4),
    "gemma4_v2": (PREFIX, {"refused: no place for reasoning": 11, "same tokens": 29}),
    "gemma4_v3": (PREFIX, _GEMMA_4),
    "gemma4_v4": (PREFIX, _GEMMA_4),
    "gemma4_v5": (PREFIX, {"refused: inexact": 3, "same tokens": 37}),
    "glm4moe": (PREFIX, {"refused: no end of turn": 40}),
    "gptoss": (
        PREFIX,
        {
            "refused: a message left out": 0,
            "refused: no place for tool calls": 2,
            "refused: reasoning of the last turn left out": 0,
            f"the twin has {[HEADERS['harmony']]}": 35,
            "unusable": 3,
        },
    ),
    "idefics3": (PREFIX, _VISION),
    "lfm2": (SHIPPED + "chatml", {"refused: no place for reasoning": 8, **_NO_CALLS, "same": 26}),
    "lfm2_2_5": (OWN, {"same tokens": 40}),
    "lfm2_2_5_v2": (OWN, {"same tokens": 40}),
    "lfm2_2_5_vl": (OWN, {"same tokens": 40}),
    "lfm2_v2": (SHIPPED + "chatml", {"refused: no place for reasoning": 11, "same": 29}),
    "llama3": (SHIPPED + "llama3", {**_PLAIN, **_NO_CALLS, "same": 25}),
    "llama3_1": (SHIPPED + "llama3_1", _LLAMA_3_1),
    "llama3_2": (SHIPPED + "llama3_1", _LLAMA_3_1),
    "llava_next": (PREFIX, {"refused: wants contents as lists of parts": 40}),
    "muse_glimmer": (PREFIX, {"refused: a message left out": 3, f"the twin has {[HEADERS['harmony']]}": 37}),
    "nemotron_3_5_lightning": (PREFIX, _NEMOTRON),
    "nemotron_3_nano": (PREFIX, _NEMOTRON),
    "nemotron_3_super": (PREFIX, _NEMOTRON),
    "nemotron_3_ultra": (PREFIX, _NEMOTRON),
    "phi3": (PREFIX, {**_PLAIN, **_NO_CALLS, "same": 25}),
    "phi3_5": (PREFIX, {**_PLAIN, **_NO_CALLS, "same": 25}),
    "qwen2_5": (SHIPPED + "qwen", {"refused: no place for reasoning": 11, "the twin has ['\\n']": 29}),
    "qwen2_5_vl": (SHIPPED + "chatml", {**_PLAIN, **_NO_CALLS, "same": 25}),
    "qwen3": (SHIPPED + "qwen", {"same": 12, "the twin writes more reasoning": 28}),
    "qwen3_5_nothink": (
        PREFIX,
        {"same": 5, "the twin has ['<think>\\n\\n</think>\\n\\n']": 8, "the twin writes more reasoning": 27},
    ),
    "qwen3_5_think": (PREFIX, _QWEN_3_5),
    "qwen3_6": (PREFIX, _QWEN_3_5),
    "qwen3_8": (
        PREFIX,
        {
            "the twin has ['<think>', '<think>\\n']": 6,
            "the twin has ['<think>']": 29,
            "the twin has ['<think>\\n']": 5,
        },
    ),
    "qwen3_instruct_2507": (SHIPPED + "qwen", {"refused: no place for reasoning": 11, "same": 29}),
    "qwen3_vl": (SHIPPED + "qwen", {"refused: no place for reasoning": 11, "same": 29}),
    "smolvlm": (PREFIX, _VISION),
}


class _Day(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "_Day":
        return cls(DAY.year, DAY.month, DAY.day, tzinfo=tz)


@pytest.fixture(scope="session")
def chats(made_chats: ModuleType) -> list[Conversation]:
    return made_chats.make_chats(COUNT)


def _names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))


def _source(name: str) -> str | None:
    path = FOLDER / f"{name}.jinja"
    return path.read_text(encoding="utf-8") if path.exists() else None


def _renderer(tokenizer: Any) -> Renderer:
    date = DAY if "strftime_now" in tokenizer.chat_template else None
    return Renderer(tokenizer, RendererConfig(date=date), frozenset({"assistant"}))


def _render_all(
    renderer: Renderer, tokenizer: Any, chats: Sequence[Conversation], outcomes: Counter[str]
) -> list[tuple[Conversation, Rendered]]:
    """The conversations that can be rendered; the others go to `outcomes`."""
    rendered = []
    for chat in chats:
        try:
            rendered.append((chat, renderer.render(chat)))
        except UnusableError:
            with pytest.raises(jinja2.TemplateError):
                tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False)
            outcomes["unusable"] += 1
        except DataError as error:
            outcomes[f"refused: {next((why for part, why in REASONS.items() if part in str(error)), str(error))}"] += 1
    return rendered


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Start and stop of each run of ones."""
    edges = [place for place, (a, b) in enumerate(pairwise([0, *mask, 0])) if bool(a) != bool(b)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _compare(tokenizer: Any, twin: str | None, chat: Conversation, sample: Sample) -> str:
    """Our tokens with the template's and our loss with the twin's, in a few words."""
    ids = sample.input_ids.tolist()
    assert ids == tokenizer.apply_chat_template(chat.messages, tools=chat.tools, return_dict=False)
    if twin is None:
        return "same tokens"
    try:
        other = tokenizer.apply_chat_template(
            chat.messages, tools=chat.tools, chat_template=twin, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception:
        return "the twin fails"
    if other["input_ids"] != ids:
        ours = _answers(tokenizer, ids, sample.loss.tolist())
        same = ours == _answers(tokenizer, other["input_ids"], other["assistant_masks"])
        return "the twin writes more reasoning" if same else "the twin says something else"
    theirs = []
    for start, stop in _runs(other["assistant_masks"]):
        while stop > start and tokenizer.decode(ids[stop - 1 : stop]).isspace():
            stop -= 1
        theirs.append((start, stop))
    ours = _runs(sample.loss.tolist())
    if ours == theirs:
        return "same"
    more, less = set(_spread(theirs)) - set(_spread(ours)), set(_spread(ours)) - set(_spread(theirs))
    words = [f"{verb} {_decode(tokenizer, ids, tokens)}" for verb, tokens in (("has", more), ("lacks", less)) if tokens]
    return f"the twin {' and '.join(words)}"


def _answers(tokenizer: Any, ids: list[int], mask: Sequence[int]) -> list[str]:
    """What carries loss, run by run, without header, reasoning and white space around it."""
    said = [tokenizer.decode(ids[start:stop]).removeprefix(HEADERS["deepseek"]) for start, stop in _runs(mask)]
    return [re.sub(r"^(<think>)?((?!<think>).)*</think>", "", text, flags=re.DOTALL).strip() for text in said]


def _spread(runs: list[tuple[int, int]]) -> list[int]:
    return [token for start, stop in runs for token in range(start, stop)]


def _decode(tokenizer: Any, ids: list[int], tokens: set[int]) -> list[str]:
    """The texts of runs of tokens, each once."""
    mask = [int(token in tokens) for token in range(len(ids))]
    return sorted({tokenizer.decode(ids[start:stop]) for start, stop in _runs(mask)})


@pytest.mark.parametrize("name", _names())
def test_tokens_are_the_templates_and_loss_is_the_twins(
    name: str, chats: list[Conversation], made_chats: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", _Day)
    source, twin = _source(name), _source(f"{name}_training")
    assert source is not None
    tokenizer = made_chats.make_tokenizer(source, made_chats.control_tokens(source))
    renderer = _renderer(tokenizer)
    outcomes: Counter[str] = Counter()
    rendered = _render_all(renderer, tokenizer, chats, outcomes)
    samples = Encoder(tokenizer).encode([one for _, one in rendered])
    outcomes.update(
        _compare(tokenizer, twin, chat, sample) for (chat, _), sample in zip(rendered, samples, strict=True)
    )
    way, expected = EXPECTED[name]
    assert renderer.description == way
    if SLOW:
        assert set(outcomes) <= set(expected)
    else:
        assert dict(outcomes) == {outcome: count for outcome, count in expected.items() if count}


@pytest.mark.parametrize("name", ["glm4moe", "nemotron_3_nano", "qwen3", "qwen3_5_think"])
def test_a_twin_as_the_template(name: str, chats: list[Conversation], made_chats: ModuleType) -> None:
    """By the marks of the template's own: transformers' mask of them, for all conversations. That of GLM ends turns
    with the token that begins the next one, which the vendor's template leaves to the next message."""
    source, twin = _source(name), _source(f"{name}_training")
    assert source is not None and twin is not None
    tokenizer = made_chats.make_tokenizer(twin, made_chats.control_tokens(source))
    renderer = _renderer(tokenizer)
    assert renderer.description == OWN
    samples = Encoder(tokenizer).encode([renderer.render(chat) for chat in chats])
    assert {_compare(tokenizer, twin, *pair) for pair in zip(chats, samples, strict=True)} == {"same"}


@pytest.mark.parametrize("name", [name for name, (way, _) in EXPECTED.items() if way.startswith(SHIPPED)])
def test_shipped_marks_and_unmarked_templates_agree(
    name: str, chats: list[Conversation], made_chats: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ways that know nothing of each other find the same places, Qwen 3's left-out reasoning included."""
    source = _source(name)
    assert source is not None
    tokenizer = made_chats.make_tokenizer(source, made_chats.control_tokens(source))
    outcomes: Counter[str] = Counter()
    by_marks = _render_all(_renderer(tokenizer), tokenizer, chats, outcomes)
    monkeypatch.setattr("trainer.data.chat.render.ways.choose_shipped", lambda *_: None)
    without = _renderer(tokenizer)
    assert without.description == PREFIX
    assert by_marks and [without.render(chat) for chat, _ in by_marks] == [one for _, one in by_marks]
