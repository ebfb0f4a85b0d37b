"""Reading `@` files (TOML, or JSON by the name's end) and JSON values into plain values, with faults in words."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli

MAX_DEPTH = 32
"""Deeper nesting is a fault: no config needs it, and recursion over it would end in a traceback."""

MAX_BYTES = 4 * 2**20
"""A larger file is none of ours (a data file given by mistake, /dev/zero), and reading it could take all memory."""

MAX_KEYS = 2000
"""A file with more of them is no config; looking for what each may have meant would take minutes."""


class ReadError(ValueError):
    """A text that cannot be read; the message says why, and where."""


def read_layer(path: str) -> dict[str, Any]:
    """The values of one file.

    Raises:
        ReadError: the file is missing, not a file, too large, not UTF-8, or not valid; names file, line and column.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ReadError(f"{path}: larger than {MAX_BYTES // 2**20} MiB, so it is no config")
        # A byte-order mark is what some editors put in front of UTF-8.
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ReadError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ReadError(f"{path}: is a folder, not a file") from None
    except UnicodeDecodeError as error:
        raise ReadError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except ReadError:
        raise
    except (OSError, ValueError) as error:
        raise ReadError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        values = read_json(text) if path.lower().endswith(".json") else _read_toml(text)
    except ReadError as error:
        raise ReadError(f"{path}{error}" if str(error).startswith(":") else f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise ReadError(f"{path}: holds no table at its top")
    return values


def read_json(text: str) -> Any:
    """The value of a JSON text. A key given twice is a fault here: JSON itself would keep the last silently.

    Raises:
        ReadError: with `:line:column: ` in front where the place is known.
    """
    try:
        return plain(json.loads(text, object_pairs_hook=_unique_keys))
    except json.JSONDecodeError as error:
        raise ReadError(f":{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ReadError("nested too deeply") from None
    except ReadError:
        raise
    except ValueError as error:
        raise ReadError(f"not valid JSON: {error}") from None


def _read_toml(text: str) -> dict[str, Any]:
    try:
        return plain(tomli.loads(text))
    except tomli.TOMLDecodeError as error:
        raise ReadError(f":{error.lineno}:{error.colno}: not valid TOML: {error.msg}") from None
    except RecursionError:
        raise ReadError("nested too deeply") from None
    except ReadError:
        raise
    except ValueError as error:
        raise ReadError(f"not valid TOML: {error}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ReadError(f"the key {json.dumps(key)} is given twice")
        values[key] = value
    return values


def plain(value: Any) -> Any:
    """The value with `"None"` at a key or in a list turned into None.

    Raises:
        ReadError: nested more than MAX_DEPTH deep, more than MAX_KEYS keys, or a string that UTF-8 cannot hold.
    """
    level, num_keys = [value], 0
    for _ in range(MAX_DEPTH):
        num_keys += sum(len(outer) for outer in level if isinstance(outer, dict))
        if num_keys > MAX_KEYS:
            raise ReadError(f"more than {MAX_KEYS} keys, so it is no config")
        level = [item for outer in level for item in _items(outer)]
        if not level:
            return _plain(value)
    raise ReadError(f"nested more than {MAX_DEPTH} deep")


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return _utf8(value)
    if isinstance(value, list):
        return [None if item == "None" else _plain(item) for item in value]
    if isinstance(value, dict):
        return {_utf8(key): None if item == "None" else _plain(item) for key, item in value.items()}
    return value


def _utf8(text: str) -> str:
    if not is_utf8(text):
        raise ReadError("holds a lone surrogate, which is no character")
    return text


def is_utf8(text: str) -> bool:
    """False for arguments with bytes that are not UTF-8 (Python hands them over as lone surrogates)."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
