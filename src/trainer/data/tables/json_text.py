"""JSON with the numbers that were written."""

import json
import re
from typing import Any

import orjson

_LONG, _LONG_BYTES = re.compile(r"\d{19}"), re.compile(rb"\d{19}")


def read_json(text: str | bytes) -> Any:
    """What the JSON text says.

    Raises:
        orjson.JSONDecodeError: it is no JSON.
    """
    value = orjson.loads(text)
    # orjson makes a float of an integer beyond 64 bits: other digits than a template should write.
    long = _LONG_BYTES.search(text) if isinstance(text, bytes) else _LONG.search(text)
    return json.loads(text) if long else value


def describe(value: Any) -> str:
    """The kind of a JSON value, with its article."""
    if isinstance(value, bool):
        return "true" if value else "false"
    kinds = {dict: "an object", list: "a list", str: "text", int: "a number", float: "a number", type(None): "null"}
    return kinds.get(type(value), f"a {type(value).__name__}")
