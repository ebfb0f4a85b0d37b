"""Whether all that a conversation says is in the text that the template makes of it.

Templates drop what they have no branch for without a word: a developer's message, tools, calls of tools, reasoning. A
model would be trained on answers to things it never sees.
"""

import json
from typing import Any

from trainer.data.chat.marks import ChatTemplate, Render
from trainer.data.chat.messages import REASONING
from trainer.data.chat.sample import ChatError, Conversation

_REASONING = frozenset(REASONING)


def shown_in(text: str, content: str) -> bool:
    """Whether `text` has a message's content: trimmed, as JSON, or without the reasoning at its start."""
    wanted = content.strip()
    if wanted in text or json.dumps(wanted, ensure_ascii=False)[1:-1] in text:
        return True
    answer = wanted.rpartition("</think>")[2].strip() if "</think>" in wanted else wanted
    return answer != wanted and answer in text


def check_presence(chat: Conversation, render: Render, own: ChatTemplate) -> None:
    """Refuse a text that leaves out a message, calls, tools or the reasoning of the last turn.

    The content of a message is looked for in what the template's loop wrote in the rounds of this message, then in what
    stands around other messages' contents (a system message may stand before the loop or in a user's message).

    Args:
        chat: the conversation.
        render: its text.
        own: the template that wrote it.

    Raises:
        ChatError: naming role and position.
    """
    last_user = max((number for number, message in enumerate(chat.messages) if message["role"] == "user"), default=-1)
    for number, message in enumerate(chat.messages):
        where = "".join([render.text[start:stop] for start, stop in render.rounds.get(number, [])])
        if not (where and shown_in(where, message["content"])):
            around = _around(chat, render, results=message["role"] == "tool")
            if not shown_in(around, message["content"]):
                raise _dropped(number, message, "this message", _hint(message["role"]))
            where = where or around
        if "tool_calls" in message:
            names = [call["function"]["name"] for call in message["tool_calls"]]
            if "tool_calls" not in own.keys or not all(name in where for name in names):
                raise _dropped(number, message, "the tool calls of this message", "use a template with tools")
        reasoning = next((message[key] for key in REASONING if isinstance(message.get(key), str)), "").strip()
        if reasoning and not own.keys & _REASONING:
            raise _dropped(number, message, "its reasoning", "take that out of the data or use another template")
        if number > last_user and reasoning not in where:
            raise _dropped(
                number, message, "its reasoning, though it is in the last turn", "see [renderer] for options"
            )
    if chat.tools:
        names = [tool.get("function", tool).get("name", "") for tool in chat.tools]
        if "tools" not in own.reads or not all(name in render.text for name in names):
            hint = "use a template with tools, or leave them out of the data"
            raise ChatError(f"the template leaves out the tools of this row; {hint}")


def _around(chat: Conversation, render: Render, *, results: bool) -> str:
    """What stands outside the rounds of messages, and in them around the contents of all but assistants. Results of
    tools may stand in an assistant's round."""
    kept, place = [], 0
    spans = [(start, stop, number) for number, rounds in render.rounds.items() for start, stop in rounds]
    for start, stop, number in sorted(spans):
        kept.append(render.text[place:start])
        place = max(place, stop)
        message = chat.messages[number]
        if results or message["role"] != "assistant":
            kept.append(render.text[start:stop].replace(message["content"].strip() or "\0", "\0", 1))
    return "\0".join([*kept, render.text[place:]])


def _hint(role: str) -> str:
    match role:
        case "developer":
            return "rename the role to system if the template has that, or use another template"
        case "system":
            return "it may take system messages at the start only"
        case _:
            return "use another template (renderer.template)"


def _dropped(number: int, message: dict[str, Any], what: str, hint: str) -> ChatError:
    return ChatError(f"message {number + 1} ({message['role']}): the template leaves out {what}; {hint}")
