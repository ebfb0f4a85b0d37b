"""The marked templates that come with us, and the choice of the one that writes what the tokenizer's own writes.

A template's name or source says little about what it writes, so both are run on probe conversations. Small things that
differ between tokenizers of a family (the default system message, a space) are read off the own template's text and
given to the shipped one as variables. The choice is a guess that is checked: the text of every row is compared too.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from trainer.data.chat.render.marks import ChatTemplate

_U, _A = "probe of a user", "probe of an assistant"
_FAMILIES = ("qwen", "chatml", "llama3", "llama3_1", "gemma", "mistral")

Probe = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]


def choose_shipped(own: ChatTemplate, variables: dict[str, Any]) -> tuple[str, ChatTemplate] | None:
    """The shipped template whose text is the own one's on all plain probes that the own one takes, and on most of the
    others; None where there is none.

    Args:
        variables: what the own template can read besides messages and tools.
    """
    plain = [(probe, text) for probe in _plain_probes() if (text := _try(own, probe)) is not None]
    others = [(probe, text) for probe in _other_probes() if (text := _try(own, probe)) is not None]
    if not plain:
        return None
    best, most = None, -1
    for family in _FAMILIES:
        for learnt in _LEARN.get(family, _learn_nothing)(own):
            shipped = ChatTemplate(_source(family), {**variables, **learnt}, traced=False)
            if any(_try(shipped, probe) != text for probe, text in plain):
                continue
            agreeing = sum(_try(shipped, probe) == text for probe, text in others)
            if agreeing > most:
                best, most = (family, shipped), agreeing
    return best


@cache
def _source(family: str) -> str:
    return files("trainer.data.chat.render").joinpath("templates", f"{family}.jinja").read_text(encoding="utf-8")


def _try(template: ChatTemplate, probe: Probe) -> str | None:
    try:
        return template.render(*probe).text
    except Exception:  # templates are programs; one that fails on a probe says nothing about it
        return None


def _say(*texts: str, system: str | None = None, **last: Any) -> list[dict[str, Any]]:
    """User and assistant in turns; `last` is added to the last message."""
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    messages[-1] = {**messages[-1], **last}
    return messages


def _plain_probes() -> list[Probe]:
    return [
        (_say("a question", "an answer"), None),
        (_say("Größe?\n", '  ein "Satz" <b>\n', "and?", "\n\nline\n\nline "), None),
        (_say("one", "two", system="be brief "), None),
        (_say("one", "two", "three", "four", system=" be\nbrief"), None),
        (_say("one", "", "three", "four"), None),
        (_say("", "x"), None),
    ]


def _other_probes() -> list[Probe]:
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": 'é"<'}}}
    result = {"role": "tool", "content": '{"sum": 3}', "tool_call_id": "a1b2c3d4e", "name": "add"}
    schema = {"type": "object", "properties": {"x": {"type": "number", "description": "é <1>"}}}
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": schema}}]
    called = _say("1 + 2?", "", tool_calls=[call])
    chain = [*called, result, {"role": "assistant", "content": "It is 3."}]
    thought = _say("q", "a", reasoning_content="hm\n")
    return [
        (_say("q", "<think>\nhm\n</think>\n\na"), None),
        (_say("q", "<think>\nhm\n</think>\n\na", "q", "<think>\n\n</think>\n\na"), None),
        (thought, None),
        ([*thought, *_say("q", "a", reasoning_content="hm")], None),
        ([*_say("q"), {"role": "system", "content": "now"}, {"role": "assistant", "content": "a"}], None),
        ([{"role": "developer", "content": "d"}, *_say("q", "a")], None),
        ([{"role": "assistant", "content": "first"}, *_say("q", "a")], None),
        (chain, None),
        (chain, tools),
        ([{"role": "system", "content": "s"}, *chain], tools),
        ([*_say("1 + 2?", "Let me see.", tool_calls=[call, call]), result, result, *_say("so?", "3")], tools * 2),
        ([*_say("1 + 2?", "", tool_calls=[call], reasoning_content="hm"), result, chain[-1]], tools),
    ]


def _learn_nothing(_own: ChatTemplate) -> Iterator[dict[str, Any]]:
    yield {}


def _learn_chatml(own: ChatTemplate) -> Iterator[dict[str, Any]]:
    text = _try(own, (_say(_U), None)) or ""
    system = re.search(r"<\|im_start\|>system\n(.*?)<\|im_end\|>\n", text, re.DOTALL)
    start = text.find("<|im_start|>")
    if start >= 0:
        yield {"opening": text[:start], "default_system": system[1] if system else ""}


def _learn_qwen(own: ChatTemplate) -> Iterator[dict[str, Any]]:
    for learnt in _learn_chatml(own):
        yield {**learnt, "reasoning": False}
        yield {**learnt, "reasoning": True}


def _learn_mistral(own: ChatTemplate) -> Iterator[dict[str, Any]]:
    text = _try(own, (_say(_U, _A, _U, _A), None)) or ""
    eos = re.escape(str(own.variables.get("eos_token", "")))
    around = re.match(rf"(.*?)(\[INST\]\s*){_U}(\s*\[/INST\])(\s*){_A}{eos}(\s*)\[INST\]", text, re.DOTALL)
    if around is None:
        return
    names = ("opening", "before_user", "after_user", "before_reply", "after_reply")
    learnt: dict[str, Any] = dict(zip(names, around.groups(), strict=True))
    system = re.search(rf"(\[SYSTEM_PROMPT\]\s*){_A}", _try(own, (_say(_U, _A, system=_A), None)) or "")
    learnt["before_system"] = system[1] if system else ""
    learnt["trims"] = f"{_A} " not in (_try(own, (_say(_U, f"{_A} "), None)) or "")
    for place in ("apart",) if system else ("first", "last"):
        yield {**learnt, "system_place": place}


_LEARN: dict[str, Callable[[ChatTemplate], Iterator[dict[str, Any]]]] = {
    "chatml": _learn_chatml,
    "qwen": _learn_qwen,
    "mistral": _learn_mistral,
}
