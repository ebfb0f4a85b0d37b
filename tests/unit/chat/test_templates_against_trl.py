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

import pytest

from configs.renderer import RendererConfig
from trainer.data.chat.encode import Encoder
from trainer.data.chat.prefix import UnmarkedTemplate
from trainer.data.chat.renderer import Renderer
from trainer.data.chat.sample import ChatError, Conversation, Rendered, Sample, UnusableError

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
EXPECTED: dict[str, tuple[str, dict[str, int]]] = {}


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
            with pytest.raises(Exception, match=""):
                tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False)
            outcomes["unusable"] += 1
        except ChatError as error:
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
        ours, theirs = (_answers(tokenizer, ids, sample.loss.tolist()), _answers(tokenizer, other["input_ids"], other["assistant_masks"]))
        return "the twin writes more reasoning" if ours == theirs else "the twin says something else"
    theirs = []
    for start, stop in _runs(other["assistant_masks"]):
        while stop > start and tokenizer.decode(ids[stop - 1 : stop]).isspace():
            stop -= 1
        theirs.append((start, stop))
    ours = _runs(sample.loss.tolist())
    if ours == theirs:
        return "same"
    more, less = set(_spread(theirs)) - set(_spread(ours)), set(_spread(ours)) - set(_spread(theirs))
    return f"the twin has {_decode(tokenizer, ids, more)} too" + (
        f" and lacks {_decode(tokenizer, ids, less)}" if less else ""
    )


def _answers(tokenizer: Any, ids: list[int], mask: Sequence[int]) -> list[str]:
    """What carries loss, run by run, without reasoning and white space at the end."""
    return [
        re.sub(r"^(<think>)?((?!<think>).)*</think>\n*", "", tokenizer.decode(ids[start:stop]), flags=re.DOTALL).rstrip()
        for start, stop in _runs(mask)
    ]


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
        assert dict(outcomes) == expected
