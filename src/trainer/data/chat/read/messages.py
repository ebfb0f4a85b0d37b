"""One message, one tool: from the forms that data has to the one that templates get.

Where a form is not known the data is refused. A message that is passed on half understood would train something else
than what was written, and nobody would see it.
"""

from typing import Any

import orjson

from trainer.data.errors import DataError
from trainer.data.tables.json_text import describe, read_json
from trainer.text import listed

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which templates read the reasoning of an assistant message."""

_KNOWN_ROLES = frozenset(ROLES)
_PLAIN = frozenset({"role", "content"})
_ROLE_HINTS = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "ipython": "tool",
}


def read_message(message: Any) -> tuple[dict[str, Any], bool | None]:
    """The message as templates get it, and whether it is to carry loss, where its `train` or `weight` says so.

    Raises:
        DataError: it has no known form.
    """
    if not isinstance(message, dict):
        raise DataError(f"is {describe(message)}, not an object with role and content")
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or role not in _KNOWN_ROLES:
        raise _bad_role(message)
    if message.keys() == _PLAIN and type(content) is str:
        # Most messages of most data: nothing to change, so nothing is copied.
        return message, None
    wish = _wish(message)
    read = {key: value for key, value in message.items() if value is not None and key not in ("train", "weight")}
    read["content"] = _read_content(content)
    for key in REASONING:
        if not isinstance(read.get(key, ""), str):
            raise DataError(f"has {describe(read[key])} as its {key}, not text")
    if "function_call" in read:
        raise DataError("has a function_call; write it as tool_calls")
    if "tool_calls" in read:
        calls = _read_calls(read.pop("tool_calls"))
        if calls and role != "assistant":
            raise DataError(f"has tool_calls, but its role is {role}")
        # Some templates ask whether there is such a key, not whether there is a call.
        if calls:
            read["tool_calls"] = calls
    return read, wish


def reasoning_of(message: dict[str, Any]) -> str | None:
    """The reasoning of a message, under whichever key."""
    return next((message[key] for key in REASONING if message.get(key) is not None), None)


def is_empty_answer(message: dict[str, Any]) -> bool:
    """Of a message of `read_message`: an assistant's that says nothing."""
    return (
        message["role"] == "assistant"
        and "tool_calls" not in message
        and not any(message.get(key, "").strip() for key in ("content", *REASONING))
    )


def read_tool(tool: Any) -> dict[str, Any]:
    """The description of a tool in OpenAI's form, which templates expect: a flat one is put under `function`.

    Raises:
        DataError: it has no known form.
    """
    tool = from_json(tool, "a tool") if isinstance(tool, str) else tool
    if not isinstance(tool, dict):
        raise DataError(f"a tool is {describe(tool)}, not an object")
    function = tool.get("function")
    if function is None:
        if not isinstance(tool.get("name"), str):
            raise DataError('a tool has neither name nor function; write {"name", "description", "parameters"}')
        function, tool = {key: value for key, value in tool.items() if key != "type"}, {"type": "function"}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError("the function of a tool is no object with a name")
    if isinstance(function.get("parameters"), str):
        parameters = from_json(function["parameters"], f"the parameters of tool {function['name']!r}")
        function = {**function, "parameters": parameters}
    return {**tool, "function": function}


def from_json(text: str, what: str) -> Any:
    """What the JSON text says.

    Raises:
        DataError: it is no JSON.
    """
    try:
        return read_json(text)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{what} cannot be read as JSON: {error.msg} at character {error.pos + 1}") from None


def _bad_role(message: dict[str, Any]) -> DataError:
    role = message.get("role")
    if role is None and message.get("from") is not None and "value" in message:
        return DataError(
            "has from and value (ShareGPT's form); rename them to role (human: user, gpt: assistant) and content"
        )
    if role is None:
        keys = listed([repr(key) for key in message]) or "none"
        return DataError(f"has no role; its keys are {keys}")
    if not isinstance(role, str):
        return DataError(f"has {describe(role)} as its role, not text")
    hint = f" ({_ROLE_HINTS[role]!r} here)" if role in _ROLE_HINTS else ""
    return DataError(f"has the unknown role {role[:80]!r}{hint}; roles are {', '.join(ROLES)}")


def _wish(message: dict[str, Any]) -> bool | None:
    wishes = {key: message[key] for key in ("train", "weight") if message.get(key) is not None}
    for key, value in wishes.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(f"has {str(value)[:80]!r} as its {key}; 0 and 1 are possible")
    if len({bool(value) for value in wishes.values()}) > 1:
        raise DataError("has a train and a weight that contradict each other")
    return bool(next(iter(wishes.values()))) if wishes else None


def _read_content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"has {describe(content)} as its content, not text; write it as a JSON string")
    texts = []
    for part in content:
        if not isinstance(part, dict):
            what = f"that is {describe(part)}"
        elif part.get("type") != "text":
            what = f"of type {str(part.get('type'))[:80]!r}"
        elif not isinstance(part.get("text"), str):
            what = "without text"
        else:
            texts.append(part["text"])
            continue
        raise DataError(f'has a part {what} in its content; only {{"type": "text", "text": ...}} can be trained on')
    return "".join(texts)


def _read_calls(calls: Any) -> list[dict[str, Any]]:
    calls = from_json(calls, "has tool_calls that") if isinstance(calls, str) else calls
    if not isinstance(calls, list):
        raise DataError(f"has {describe(calls)} as its tool_calls, not a list")
    return [_read_call(call) for call in calls]


def _read_call(call: Any) -> dict[str, Any]:
    """`{"name", "arguments"}`, alone or under `function`, to `{"id", "type", "function": {"name", "arguments"}}`."""
    if not isinstance(call, dict):
        raise DataError(f"has a tool call that is {describe(call)}, not an object")
    call = {key: value for key, value in call.items() if value is not None}
    if "function" in call:
        outer, function = call, call["function"]
        if not isinstance(function, dict):
            raise DataError(f"has a tool call whose function is {describe(function)}, not an object")
    else:
        outer = {key: call[key] for key in ("id", "type") if key in call}
        function = {key: value for key, value in call.items() if key not in outer}
    name = function.get("name")
    if not isinstance(name, str):
        raise DataError("has a tool call without the name of a function")
    arguments: Any = function.get("arguments")
    if arguments is None and "parameters" in function:
        raise DataError(f"has a call of {name!r} with parameters; arguments is the key for them")
    if isinstance(arguments, str):
        # Calls without arguments are often written as the empty text.
        arguments = from_json(arguments, f"has arguments of its call of {name!r} that") if arguments else {}
    if not isinstance(arguments, dict | None):
        raise DataError(f"has {describe(arguments)} as the arguments of its call of {name!r}, not an object")
    rest = {key: value for key, value in function.items() if value is not None and key not in ("name", "arguments")}
    identity: dict[str, Any] = {"id": outer["id"]} if "id" in outer else {}
    others = {key: value for key, value in outer.items() if key not in ("id", "type", "function")}
    called = {"name": name, "arguments": arguments or {}, **rest}
    return {**identity, "type": outer.get("type", "function"), "function": called, **others}
