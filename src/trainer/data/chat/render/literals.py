"""Text in messages that spells a control token, and its places in the rendered text.

`<|im_end|>` in what a user wrote must not end the user's turn, so such text is tokenised as ordinary text. Its places
are found by a second render in which every spelling is replaced by a stand-in that occurs nowhere else. The text of the
row is that of the first render all the same: the second one counts only if putting the spellings back where the
stand-ins are gives the first text again, character by character. So templates may trim, escape or move texts as they
like. Where the texts differ, the template looked at a spelling: `</think>` splits off reasoning in some. That spelling,
in the string where it is so, is left to the template if its source names it, and refused otherwise.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from os.path import commonprefix
from typing import Any

from trainer.data.chat.render.marks import Span
from trainer.data.chat.sample import Conversation
from trainer.data.errors import DataError

Form = Callable[[Conversation], str]
"""Renders a conversation to text."""

_OPEN, _CLOSE = "\U000f0f00", "\U000f0f01"
_FIRST_DIGIT = 0xF1000


class ControlTokens:
    """The control tokens of a tokenizer as text."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = tuple(sorted({token for token in tokens if token.strip()}))
        self._numbers = {token: number for number, token in enumerate(self.tokens)}
        self._spelt = re.compile(_pattern(self.tokens) if self.tokens else "(?!)")
        self._stand_in = re.compile(f"{_OPEN}(.){_CLOSE}")

    def spelt_in(self, chat: Conversation) -> bool:
        """Whether any string of the conversation spells a control token."""
        search = self._spelt.search
        return any(search(text) is not None for text in _strings([chat.messages, chat.tools]))

    def end_in(self, text: str, start: int, stop: int) -> int | None:
        """Where the control token ends that ends a part of the text, white space after it apart; None without one."""
        part = text[start:stop].rstrip()
        return start + len(part) if part.endswith(self.tokens) else None

    def end_of_token_at(self, text: str, start: int) -> int | None:
        """Where the control token that begins at `start` ends; None without one."""
        match = self._spelt.match(text, start)
        return match.end() if match else None

    def places(self, chat: Conversation, text: str, form: Form, names: str) -> list[Span]:
        """The parts of `text` that spell control tokens and come from the conversation.

        Args:
            chat: a conversation with spelt control tokens.
            text: its render.
            form: renders others like it.
            names: the source of the template.

        Raises:
            DataError: they cannot be told apart from those of the template.
        """
        if any(_OPEN in string or _CLOSE in string for string in _strings([chat.messages, chat.tools])):
            raise DataError("a message has both text that spells a control token and characters U+F0F00 or U+F0F01")
        found = self._compare(chat, text, form, lambda *_: True)
        if found is not None:
            return found
        left: set[tuple[int, str]] = set()
        for leaf, string in enumerate(_strings([chat.messages, chat.tools])):
            for token in sorted(set(self._spelt.findall(string))):
                if self._compare(chat, text, form, lambda *spelling, one=(leaf, token): spelling == one) is None:
                    if token not in names:
                        raise _inseparable(token)
                    left.add((leaf, token))
        found = self._compare(chat, text, form, lambda *spelling: spelling not in left)
        if found is None:
            raise _inseparable(sorted(token for _, token in left)[0] if left else "")
        return found

    def _compare(
        self, chat: Conversation, text: str, form: Form, hides: Callable[[int, str], bool]
    ) -> list[Span] | None:
        """Places of the spellings that are hidden, by number of the string and token; None where the texts differ."""
        leaves = count()

        def replace(string: str) -> str:
            leaf = next(leaves)
            return self._spelt.sub(lambda match: self._hide(match[0]) if hides(leaf, match[0]) else match[0], string)

        messages, tools = _map(chat.messages, replace), _map(chat.tools, replace)
        try:
            rendered = form(Conversation(messages=messages, tools=tools, trains=chat.trains))
        except Exception:  # templates are programs: one that fails now did look at the spelling
            return None
        parts, places, length, start = [], [], 0, 0
        for match in self._stand_in.finditer(rendered):
            token = self.tokens[ord(match[1]) - _FIRST_DIGIT]
            parts += [rendered[start : match.start()], token]
            length += match.start() - start
            places.append((length, length + len(token)))
            length, start = length + len(token), match.end()
        return places if "".join([*parts, rendered[start:]]) == text else None

    def _hide(self, token: str) -> str:
        return f"{_OPEN}{chr(_FIRST_DIGIT + self._numbers[token])}{_CLOSE}"


def _inseparable(token: str) -> DataError:
    return DataError(
        f"a message spells the control token {token!r} and the template treats that text in its own way, so it cannot "
        "be kept apart from the template's own; take it out of the data"
    )


def _strings(value: Any) -> Iterator[str]:
    """All strings of a value, keys included, in the order of `_map`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _map(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map(key, change): _map(item, change) for key, item in value.items()}
    return [_map(item, change) for item in value] if isinstance(value, list) else value


def _pattern(tokens: Iterable[str]) -> str:
    """A pattern of all tokens, the longest first where several fit. Tokens with the same start share its test: some
    tokenizers have thousands of them."""
    heads: dict[str, list[str]] = {}
    for token in tokens:
        heads.setdefault(token[0], []).append(token)
    branches = []
    for group in heads.values():
        start = commonprefix(group)
        longer = [token.removeprefix(start) for token in group if token != start]
        more = f"(?:{_pattern(longer)}){'?' if len(longer) < len(group) else ''}" if longer else ""
        branches.append(re.escape(start) + more)
    return "|".join(branches)
