"""One value against one slot: the text of a flag as a value, whether a value has the right type, and both in words.

Types are checked here, before pydantic, because pydantic would turn `true` into 1 and "5" into 5, and because its
messages about unions name Python classes. Ranges and patterns stay with pydantic.
"""

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli

from configs.files import ReadError, plain, read_json
from configs.safe_text import star_secrets
from configs.schema import Key, Slot, is_table, item_slot, slot_of

MAX_SHOWN = 80
"""Longer values are cut in messages."""

_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)

MAX_INT = 2**63 - 1
"""The largest integer of TOML."""


def show(value: Any) -> str:
    """The value as in JSON, without secrets, cut to MAX_SHOWN characters; None as TOML writes it."""
    text = '"None"' if value is None else star_secrets(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def parse_flag(slot: Slot, texts: Sequence[str]) -> Any:
    """The value that a flag's texts (one or more) give; a text that fits no type stays text, for the type check.

    Raises:
        ReadError: JSON that is not valid.
    """
    if len(texts) == 1 and texts[0] == "None":
        return None
    if slot.is_list:
        if len(texts) == 1 and texts[0].startswith("["):
            return _json(texts[0], "write the entries after the flag with spaces between, or as JSON")
        items = item_slot(slot)
        return [None if text == "None" and items.optional else _parse_text(items, text) for text in texts]
    if len(texts) > 1:
        return [_parse_text(slot, text) for text in texts]
    return _parse_text(slot, texts[0])


def _parse_text(slot: Slot, text: str) -> Any:
    for member in slot.members:
        origin = get_origin(member)
        if is_table(member) or member is dict or origin is dict:
            if text.startswith("{"):
                return _json(text, "a table is given as JSON")
            if slot.optional and text.lower() in ("true", "false"):
                return {} if text.lower() == "true" else None
        elif member is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        elif member is int and re.fullmatch(r"[+-]?\d+(_\d+)*", text, re.ASCII) and len(text) < MAX_SHOWN:
            return int(text)
        elif member is float and (number := _float(text)) is not None:
            return number
        elif origin is Literal and text in [str(option) for option in get_args(member)]:
            return next(option for option in get_args(member) if str(option) == text)
        elif member is Any:
            return _toml_value(text)
    return text


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _json(text: str, hint: str) -> Any:
    try:
        return read_json(text)
    except ReadError as error:
        message = re.sub(r"^:\d+:(\d+): ", r"column \1: ", str(error))
        raise ReadError(f"{message} ({hint})") from None


def _toml_value(text: str) -> Any:
    """What TOML or JSON makes of the text (numbers, true, quoted strings, lists, tables); else the text itself."""
    if text == "None":
        return None
    if text.startswith(("{", "[")):
        return _json(text, "a table or list below a dict is given as JSON")
    try:
        values = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # A text with line ends or a date in it is no TOML number: keep it as written.
    is_value = list(values) == ["value"] and isinstance(values["value"], (bool, int, float, str))
    return plain(values["value"]) if is_value else text


def accepts(slot: Slot, value: Any) -> bool:
    """Whether the value has a type of the slot. Tables and what is in them are checked key by key elsewhere."""
    if value is None:
        return slot.optional or Any in slot.members
    return any(_fits(member, value) for member in slot.members)


def _fits(member: Any, value: Any) -> bool:
    origin = get_origin(member)
    if member is Any:
        return not misfits_json(value)
    if is_table(member):
        return isinstance(value, dict)
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in get_args(member))
    if member is bool:
        return isinstance(value, bool)
    if member is int:
        return _is_int(value)
    if member is float:
        return isinstance(value, float) or _is_int(value)
    if member is str:
        return isinstance(value, str)
    if member is datetime.date:
        return _is_date(value)
    if member is Path:
        # An empty one would be the current folder: what a script gives whose variable is not set.
        return isinstance(value, str) and value != ""
    if member is dict or origin is dict:
        return isinstance(value, dict) and not misfits_json(value)
    if origin is list:
        items = slot_of(get_args(member)[0])
        return isinstance(value, list) and all(accepts(items, item) for item in value)
    if origin is tuple:
        parts = get_args(member)
        return isinstance(value, list) and len(value) == len(parts) and all(map(accepts, map(slot_of, parts), value))
    raise TypeError(f"configs cannot check a field of type {member!r}")


def _is_date(value: Any) -> bool:
    """TOML's date or one as text, which is what flags and JSON give; a time of day is another type."""
    if isinstance(value, str) and _DATE.fullmatch(value):
        try:
            datetime.date.fromisoformat(value)
        except ValueError:
            return False
        return True
    return type(value) is datetime.date


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INT


def misfits_json(value: Any, above: Key = ()) -> list[tuple[Key, Any]]:
    """What in the value JSON cannot give back, and where: TOML's dates and times, integers beyond 64 bits."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [misfit for name, item in items for misfit in misfits_json(item, (*above, str(name)))]
    return [] if value is None or isinstance(value, (bool, str, float)) or _is_int(value) else [(above, value)]


def explain_type(slot: Slot, value: Any) -> str:
    """What was expected and what came, for a value that the slot does not accept."""
    if isinstance(value, int) and misfits_json(value):
        return f"{show(value)} does not fit in 64 bits"
    got = "None" if value is None else show(value)
    hint = "; put a date or time in quotes if it is text" if misfits_json(value) else ""
    return f"expected {describe(slot)}, got {got}{hint}"


def describe(slot: Slot) -> str:
    """The slot's types in plain words, with the allowed values of literals."""
    words = list(dict.fromkeys(_words(member) for member in slot.members))
    return join_or([*words, '"None"'] if slot.optional else words)


def _words(member: Any) -> str:
    origin = get_origin(member)
    if origin is Literal:
        return join_or([json.dumps(option) for option in get_args(member)])
    if origin is list:
        return f"a list, each {describe(slot_of(get_args(member)[0]))}"
    if origin is tuple:
        parts = [describe(slot_of(part)) for part in get_args(member)]
        kinds = f"each {parts[0]}" if len(set(parts)) == 1 else ", ".join(parts)
        return f"a list of {len(parts)}, {kinds}"
    if is_table(member) or member is dict or origin is dict:
        return "a table"
    plain_words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    return (plain_words | {datetime.date: "a date (2026-11-05)"}).get(member, "any value")


def join_or(options: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return f"{', '.join(options[:-1])} or {options[-1]}" if len(options) > 1 else "".join(options)
