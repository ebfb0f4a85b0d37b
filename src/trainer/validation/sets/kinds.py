"""Kinds of held-out text: which columns make which, and what a row of each says."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, Literal

from trainer.data.errors import DataError
from trainer.data.tables.json_text import describe
from trainer.text import listed

Kind = Literal["ppl", "ctxcont", "pairs", "choices"]

_REQUIRED: dict[Kind, tuple[str, ...]] = {
    "ppl": ("text",),
    "ctxcont": ("context", "continuation"),
    "pairs": ("chosen", "rejected"),
    "choices": ("choices", "answer"),
}
_OPTIONAL: dict[Kind, tuple[str, ...]] = {"ppl": (), "ctxcont": (), "pairs": ("context",), "choices": ("context",)}

_CONTEXT_ELSEWHERE = ("prompt", "question", "query", "input")
"""What others call the context. Options scored without the question that they answer would be numbers about nothing."""

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDocument:
    """A row."""

    context: str
    """Not scored; "" where there is none."""

    options: Sequence[str]
    """What is scored, each alone after the context: one text or continuation; the chosen and the rejected; or the
    choices."""

    right: int
    """The option that is the right one."""


def columns_of(kind: Kind) -> list[str]:
    """Those that are read."""
    return [*_REQUIRED[kind], *_OPTIONAL[kind]]


def find_kind(columns: Sequence[str], file: str) -> Kind:
    """The kind that columns make; others beside them do not matter.

    Args:
        file: as messages call it.

    Raises:
        DataError: they make none, or two, or lack the context that they seem to have under another name.
    """
    made: list[Kind] = [kind for kind, required in _REQUIRED.items() if set(required) <= set(columns)]
    if len(made) != 1:
        has = f"{file} has the columns {listed(sorted(columns), 12)}" if columns else f"{file} has no column"
        if made:
            raise DataError(f"{has}: those of two kinds of set, {' and '.join(made)}; leave the columns of one")
        kinds = "; ".join(f"{', '.join(required)} ({kind})" for kind, required in _REQUIRED.items())
        raise DataError(f"{has}, and they make no kind of set; the kinds take {kinds}")
    kind = made[0]
    if "context" in _OPTIONAL[kind] and "context" not in columns:
        other = next((name for name in _CONTEXT_ELSEWHERE if name in columns), None)
        if other is not None:
            raise DataError(
                f"{file} has {listed(_REQUIRED[kind])} and {other!r}, but no context, so {other!r} would not be read; "
                f"rename it to context, or take it out"
            )
    return kind


def read_document(kind: Kind, row: dict[str, Any]) -> TextDocument:
    """What a row says.

    Raises:
        DataError: a column is missing or holds something else than it should.
    """
    match kind:
        case "ppl":
            return TextDocument(context="", options=(_text(row, "text"),), right=0)
        case "ctxcont":
            return TextDocument(context=_text(row, "context"), options=(_text(row, "continuation"),), right=0)
        case "pairs":
            options = (_text(row, "chosen"), _text(row, "rejected"))
            return TextDocument(context=_context(row), options=options, right=0)
        case "choices":
            choices = _choices(row)
            return TextDocument(context=_context(row), options=choices, right=_answer(row, len(choices)))


def _text(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise DataError(f"has no {column}" if column not in row else f"has {describe(value)} as {column}, not text")
    return _whole(value, column)


def _whole(text: str, column: str) -> str:
    if not text.isascii() and _SURROGATE.search(text):
        raise DataError(f"has half of a character (a lone surrogate, \\ud800 to \\udfff) in {column}, which is no text")
    return text


def _context(row: dict[str, Any]) -> str:
    return "" if row.get("context") is None else _text(row, "context")


def _choices(row: dict[str, Any]) -> Sequence[str]:
    choices = row.get("choices")
    if not isinstance(choices, list):
        what = "no choices" if "choices" not in row else f"{describe(choices)} as choices, not a list of texts"
        raise DataError(f"has {what}")
    if len(choices) < 2:
        raise DataError(f"has {len(choices)} choices; a question takes two or more")
    for choice in choices:
        if not isinstance(choice, str):
            raise DataError(f"has {describe(choice)} among its choices; all must be texts")
        _whole(choice, "choices")
    return choices


def _answer(row: dict[str, Any], num_choices: int) -> int:
    answer = row.get("answer")
    if not isinstance(answer, int) or isinstance(answer, bool):
        value = f" ({shorten(repr(answer), 40)})" if isinstance(answer, float | str) else ""
        what = "no answer" if "answer" not in row else f"{describe(answer)}{value} as answer"
        raise DataError(f"has {what}; write the number of the right choice, 0 for the first, as an integer")
    if not 0 <= answer < num_choices:
        raise DataError(f"has answer {answer}, but its {num_choices} choices are numbered from 0 to {num_choices - 1}")
    return answer
