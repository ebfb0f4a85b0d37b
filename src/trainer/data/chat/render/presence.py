"""Whether all that a conversation says is in the text that the template makes of it.

Templates drop what they have no branch for without a word: a developer's message, tools, calls of tools, reasoning. A
model would be trained on answers to things it never sees.
"""

import json
from collections.abc import Mapping
from typing import Any

from trainer.data.chat.read.messages import REASONING, reasoning_of
from trainer.data.chat.render.marks import ChatTemplate, Span
from trainer.data.chat.sample import Conversation
from trainer.data.errors import DataError

STAND_IN = "\ue000stand-in\ue001"
"""Content that no message has."""


def shown_in(text: str, content: str) -> bool:
    """Whether `text` has a message's content: trimmed, as JSON, or without the reasoning at its start."""
    wanted = content.strip()
    if wanted in text or json.dumps(wanted, ensure_ascii=False)[1:-1] in text:
        return True
    answer = wanted.rpartition("</think>")[2].strip() if "</think>" in wanted else wanted
    return answer != wanted and answer in text


def with_stand_in(messages: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """The messages with another content of one of them."""
    return [*messages[:number], {**messages[number], "content": STAND_IN}, *messages[number + 1 :]]


def check_presence(chat: Conversation, text: str, places: Mapping[int, list[Span]], own: ChatTemplate) -> None:
    """Refuse a text that leaves out a message, calls, tools or the reasoning of the last turn.

    Args:
        chat: the conversation.
        text: its render.
        places: where messages stand in it, as far as that is known. A message whose content is not in its places is
            looked for with a second render, in which another content stands in for it: looking for the content itself
            would take the "user" of a header for a message that says "user".
        own: the template that wrote it.

    Raises:
        DataError: naming role and position.
    """
    last_user = max((number for number, message in enumerate(chat.messages) if message["role"] == "user"), default=-1)
    for number, message in enumerate(chat.messages):
        where = "".join([text[start:stop] for start, stop in places.get(number, [])])
        if not where or not shown_in(where, message["content"]) or _is_in_calls(message):
            if message["content"].strip() and not _reacts(chat, number, own):
                raise _dropped(number, message, "this message", _hint(message["role"]))
            where = where or text
        if "tool_calls" in message:
            names = [call["function"]["name"] for call in message["tool_calls"]]
            if "tool_calls" not in own.keys or any(where.count(name) < names.count(name) for name in names):
                raise _dropped(number, message, "the tool calls of this message", "use a template with tools")
        reasoning = (reasoning_of(message) or "").strip()
        if reasoning and own.keys.isdisjoint(REASONING):
            raise _dropped(number, message, "its reasoning", "take that out of the data or use another template")
        if number > last_user and reasoning not in where:
            raise _dropped(
                number, message, "its reasoning, though it is in the last turn", "see [renderer] for options"
            )
    if chat.tools:
        names = [tool["function"]["name"] for tool in chat.tools]
        if "tools" not in own.reads or not all(name in text for name in names):
            hint = "use a template with tools, or leave them out of the data"
            raise DataError(f"the template leaves out the tools of this row; {hint}")


def _is_in_calls(message: dict[str, Any]) -> bool:
    """Whether the calls of a message say its content too: to find it proves nothing then."""
    if "tool_calls" not in message:
        return False
    content = message["content"].strip()
    return bool(content) and content in json.dumps(message["tool_calls"], ensure_ascii=False)


def _reacts(chat: Conversation, number: int, own: ChatTemplate) -> bool:
    """Whether another content of a message would be in the text."""
    try:
        return STAND_IN in own.render(with_stand_in(chat.messages, number), chat.tools).text
    except Exception:  # templates are programs; one that minds the content does not show that it writes it
        return False


def _hint(role: str) -> str:
    match role:
        case "developer":
            return "rename the role to system if the template has that, or use another template"
        case "system":
            return "it may take system messages at the start only"
        case _:
            return "use another template (renderer.template)"


def _dropped(number: int, message: dict[str, Any], what: str, hint: str) -> DataError:
    return DataError(f"message {number + 1} ({message['role']}): the template leaves out {what}; {hint}")
