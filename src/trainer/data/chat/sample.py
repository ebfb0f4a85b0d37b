"""What a conversation is on its way from a row of data to tokens, and what can be wrong with it."""

from dataclasses import dataclass
from typing import Any

import numpy as np


class UnusableError(Exception):
    """A row that is sound but gives no sample: it is left out.

    The message is the reason that it is counted under: a few words, the same for all rows of its kind.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A row in the one form that templates get."""

    messages: list[dict[str, Any]]
    """Each with `role` and `content` (text), and what else the template may read: `tool_calls` with arguments as
    tables, `reasoning_content`, `name`, `tool_call_id`. No value is None."""

    tools: list[dict[str, Any]] | None
    """Descriptions of tools; None where there are none."""

    trains: list[bool]
    """Per message: it carries loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str

    loss_spans: list[tuple[int, int]]
    """[start, stop) in characters of `text`, ascending, apart: what carries loss."""

    literal_spans: list[tuple[int, int]]
    """Parts of `text` that come from messages and spell a control token: they are tokenised as ordinary text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A conversation as tokens."""

    input_ids: np.ndarray
    """(tokens,) int32"""

    loss: np.ndarray
    """(tokens,) bool: this token is a target. The first one never is: nothing comes before it."""
