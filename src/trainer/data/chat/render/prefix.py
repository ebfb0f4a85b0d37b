"""Where a message lies in the text of a template without marks: strict prefix rendering, else the rounds of its loop.

Let R(n) be the text of the first n messages and P(n) the same with the start of an assistant message at its end, which
is what a model is given to answer. What message n (from 0) adds is the text between P(n) and R(n + 1), if P(n) begins
R(n + 1) and R(n + 1) begins the whole text, character by character.

A template that writes earlier messages otherwise once others follow (reasoning left out of the history, an end of text
after the last message) fails that. Its messages are then what the rounds of its loop over messages wrote, if each
message has one round with all of its text in it, and an assistant's begins with the start that the model is given.
"""

from typing import Any

from trainer.data.chat.render.literals import ControlTokens
from trainer.data.chat.render.marks import ChatTemplate, RefusedError, Render, Span
from trainer.data.chat.render.presence import STAND_IN, shown_in, with_stand_in
from trainer.data.chat.sample import Conversation
from trainer.data.errors import DataError

ADVICE = "Use a template with {% generation %} marks around what the assistant says (renderer.template)"

QUESTION: dict[str, Any] = {"role": "user", "content": "probe of a user"}
_THOUGHT = ("<think>", "<seed:think>", "[THINK]")
"""How reasoning begins. Some templates start it for the model, in some modes with its end."""


class Unmarked:
    """By strict prefix rendering, or the rounds of the template's loop. A Way, see `ways`."""

    name = "by strict prefix rendering, else by the rounds of the template's loop over messages"

    def __init__(self, own: ChatTemplate, control: ControlTokens) -> None:
        self._own = own
        self._control = control
        self._has_prompt = "add_generation_prompt" in own.reads
        self._starts = _starts(own) if self._has_prompt else _starts_without_prompt(own)

    def marks(self, chat: Conversation, render: Render) -> None:
        return None

    def parts(self, chat: Conversation, render: Render, marks: object) -> list[Span]:
        return [self.part(chat, render, number) for number, train in enumerate(chat.trains) if train]

    def part(self, chat: Conversation, render: Render, number: int) -> Span:
        """Start and stop in the text of what a message adds after its header, up to the end of its turn.

        Raises:
            DataError: neither way is exact.
        """
        start, stop = self._body(chat, render, number)
        end = self._control.end_in(render.text, start, stop)
        if end is not None:
            return start, end
        if chat.messages[number]["role"] == "assistant":
            raise no_end(chat, number)
        # Not every role has an end of its own. The body of such a message begins with its content.
        content = chat.messages[number]["content"]
        trimmed = render.text.startswith(content.strip(), start)
        return start, start + len(content.strip() if trimmed else content)

    def _body(self, chat: Conversation, whole: Render, number: int) -> Span:
        assistant = chat.messages[number]["role"] == "assistant"
        try:
            return (self._answer if assistant else self._content)(chat, number, whole.text)
        except _InexactError as error:
            found = self._round(chat, whole, number) if assistant else None
            if found is None:
                what = f"{place(chat, number)} cannot be found exactly in the text"
                raise DataError(f"{what}: {error}. {ADVICE}") from None
            return found

    def strip_start(self, text: str) -> str:
        """What an assistant says, without the start that the model is given; the text itself where it has none."""
        return next((text[len(start) :] for start in self._starts if start and text.startswith(start)), text)

    def _said(self, text: str) -> str:
        """The same of a text that has a start."""
        said = self.strip_start(text)
        if said == text and "" not in self._starts:
            raise _InexactError("the template begins it in another way than others")
        return said

    def _answer(self, chat: Conversation, number: int, text: str) -> Span:
        """An assistant's message: all that follows the start that the model is given."""
        before = self._render(chat, number, prompt=True)
        after = text if number + 1 == len(chat.messages) else self._render(chat, number + 1)
        _check(before, after, text)
        added = after[len(before) :]
        # Without a prompt the start is still to come. Some templates that have one give none after results of tools and
        # then write it all the same.
        said = self.strip_start(added) if self._has_prompt else self._said(added)
        return len(after) - len(said), len(after)

    def _content(self, chat: Conversation, number: int, text: str) -> Span:
        """Another's message: from its content on, whose place shows when another text stands there."""
        content = chat.messages[number]["content"].strip()
        before, after = self._render(chat, number), self._render(chat, number + 1)
        _check(before, after, text)
        head, found, tail = self._render(chat, number + 1, stand_in=True).partition(STAND_IN)
        around = head, after[len(head) : len(after) - len(tail)].strip(), tail
        if not found or STAND_IN in tail or len(head) < len(before) or around[1] != content:
            raise _InexactError("its content cannot be told from what stands around it")
        if not (after.startswith(head) and after.endswith(tail)):
            raise _InexactError("the template writes other things around another content")
        return len(head), len(after)

    def _round(self, chat: Conversation, whole: Render, number: int) -> Span | None:
        """The round of an assistant's message after its start."""
        if not all(_has_own_round(whole, *numbered) for numbered in enumerate(chat.messages)):
            return None
        rounds = whole.rounds.get(number, [])
        if len(rounds) != 1:
            return None
        start, stop = rounds[0]
        try:
            return stop - len(self._said(whole.text[start:stop])), stop
        except _InexactError:
            return None

    def _render(self, chat: Conversation, count: int, *, prompt: bool = False, stand_in: bool = False) -> str:
        messages = chat.messages[:count]
        if stand_in:
            messages = with_stand_in(messages, count - 1)
        try:
            return self._own.render(messages, chat.tools, prompt=prompt).text
        except Exception as error:  # templates are programs and fail in every way
            reason = str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
            raise _InexactError(f"the template cannot render the first {count} messages alone ({reason})") from None


def _has_own_round(whole: Render, number: int, message: dict[str, Any]) -> bool:
    """All that a message says stands in one round of its own; a system message may stand before the loop."""
    rounds = whole.rounds.get(number, [])
    if not rounds and number == 0 and message["role"] in ("system", "developer"):
        return True
    return not message["content"].strip() or (
        len(rounds) == 1 and shown_in(whole.text[slice(*rounds[0])], message["content"])
    )


class _InexactError(Exception):
    pass


def place(chat: Conversation, number: int) -> str:
    """A message in the words of messages."""
    return f"message {number + 1} ({chat.messages[number]['role']})"


def no_end(chat: Conversation, number: int) -> DataError:
    """An answer that a model would never learn to stop after."""
    what = f"{place(chat, number)}: the template ends it with no control token"
    return DataError(f"{what}. Use a template that writes one inside {{% generation %}} marks (renderer.template)")


def _check(before: str, after: str, text: str) -> None:
    if not after.startswith(before):
        parting = _parting(before, after)
        raise _InexactError(f"the template prompts for it with a start that it does not have afterwards ({parting})")
    if not text.startswith(after):
        parting = _parting(after, text)
        raise _InexactError(f"the template writes it otherwise once messages follow ({parting})")


def _parting(prefix: str, text: str) -> str:
    """Where two texts part, in words."""
    same = next((n for n, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b), min(len(prefix), len(text)))
    return f"{prefix[same : same + 20]!r} there, {text[same : same + 20]!r} here"


def _starts(own: ChatTemplate) -> tuple[str, ...]:
    """The start of an assistant message that the model is given, longest first: whole, and without reasoning that the
    template starts for it. Empty where it cannot be found out."""
    try:
        render = own.render([QUESTION], prompt=True)
    except Exception:  # templates are programs and fail in every way
        return ()
    if 0 not in render.rounds:
        return ()
    start = render.text[render.rounds[0][-1][1] :]
    cut = min((place for thought in _THOUGHT if (place := start.find(thought)) >= 0), default=len(start))
    return tuple(dict.fromkeys((start, start[:cut])))


def _starts_without_prompt(own: ChatTemplate) -> tuple[str, ...]:
    """Of a template that writes none on demand: what stands before the content of an answer. White space there, as in
    Mistral's templates, is missing before calls of tools."""
    try:
        before = own.render([QUESTION]).text
        after = own.render([QUESTION, {"role": "assistant", "content": STAND_IN}]).text
    except Exception:  # templates are programs and fail in every way
        return ()
    start, found, _ = after.removeprefix(before).partition(STAND_IN)
    if not found or not after.startswith(before):
        return ()
    return (start,) if start.strip() else tuple(dict.fromkeys((start, "")))
