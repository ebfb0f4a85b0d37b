"""The ways to find what carries loss in a rendered text; see `renderer`."""

from typing import Any, Protocol

from trainer.data.chat.render.literals import ControlTokens
from trainer.data.chat.render.marks import ChatTemplate, Render, Span
from trainer.data.chat.render.prefix import ADVICE, QUESTION, Unmarked, no_end, place
from trainer.data.chat.render.presence import STAND_IN, shown_in
from trainer.data.chat.render.shipped import choose_shipped
from trainer.data.chat.sample import Conversation
from trainer.data.errors import DataError

Marks = dict[int, list[Span]]
"""By number of the message."""


class Way(Protocol):
    """Finds the parts of a text that carry loss."""

    name: str
    """In a few words."""

    def marks(self, chat: Conversation, render: Render) -> Marks | None:
        """Where all messages stand in the render, if marks say so."""
        ...

    def parts(self, chat: Conversation, render: Render, marks: Marks | None) -> list[Span]:
        """The parts, in order, that the messages that train say, ends of turns included.

        Args:
            chat: the conversation.
            render: its text.
            marks: of this way.

        Raises:
            DataError: there is no exact answer.
        """
        ...


def choose_way(own: ChatTemplate, control: ControlTokens, roles: frozenset[str]) -> Way:
    """The first way that fits a template.

    Args:
        own: the template.
        control: the tokenizer's control tokens.
        roles: whose messages carry loss; marks of a template's own are around assistants alone.
    """
    unmarked = Unmarked(own, control)
    marked = OwnMarks(own, control, unmarked) if own.is_marked else None
    if marked is not None and roles <= {"assistant"}:
        return marked
    shipped = choose_shipped(own, own.variables)
    if shipped is not None:
        return ShippedMarks(*shipped, unmarked)
    return marked or unmarked


class ShippedMarks:
    """By a shipped template, where its text is the same; else as without marks."""

    def __init__(self, family: str, template: ChatTemplate, otherwise: Unmarked) -> None:
        self.name = f"by the marks of the shipped template {family}"
        self.template = template
        self._otherwise = otherwise

    def marks(self, chat: Conversation, render: Render) -> Marks | None:
        try:
            marked = self.template.render(chat.messages, chat.tools)
        except Exception:  # templates are programs; the shipped one need not know all that the own one takes
            return None
        return {number: [(start, stop)] for number, start, stop in marked.marks} if marked.text == render.text else None

    def parts(self, chat: Conversation, render: Render, marks: Marks | None) -> list[Span]:
        trains = [number for number, train in enumerate(chat.trains) if train]
        if marks is None or not marks.keys() >= set(trains):
            return self._otherwise.parts(chat, render, None)
        return sorted(span for number in trains for span in marks[number])


class OwnMarks:
    """By the template's own marks around what assistants say."""

    name = "by the template's own marks"

    def __init__(self, own: ChatTemplate, control: ControlTokens, otherwise: Unmarked) -> None:
        self._plain_end = _plain_end(own)
        self._control = control
        self._otherwise = otherwise

    def marks(self, chat: Conversation, render: Render) -> Marks | None:
        return None  # the author's are around assistants alone

    def parts(self, chat: Conversation, render: Render, marks: Marks | None) -> list[Span]:
        marks = _by_message(chat, render)
        spans: list[Span] = []
        for number, message in enumerate(chat.messages):
            if not chat.trains[number]:
                continue
            if message["role"] != "assistant":
                spans.append(self._otherwise.part(chat, render, number))
                continue
            said = "".join(render.text[start:stop] for start, stop in marks[number])
            if not shown_in(said, message["content"]):
                raise DataError(f"{place(chat, number)}: the template's marks do not enclose what it says")
            spans += self._with_end(chat, render, number, self._without_start(render.text, marks[number]))
        return sorted(spans)

    def _without_start(self, text: str, marks: list[Span]) -> list[Span]:
        (start, stop), *others = marks
        return [(stop - len(self._otherwise.strip_start(text[start:stop])), stop), *others]

    def _with_end(self, chat: Conversation, render: Render, number: int, marks: list[Span]) -> list[Span]:
        """The token that ends the turn comes last: it may stand behind the marks, or white space behind it."""
        *others, (start, stop) = marks
        text = render.text
        end = self._control.end_in(text, start, stop)
        if end is None and not _begins_another(render, number, stop):
            end = self._control.end_of_token_at(text, stop)
        if end is None:
            # Without control tokens the end may be any text, but there has to be one.
            end = start + len(text[start:stop].rstrip())
            if not self._plain_end or not text.endswith(self._plain_end, start, end):
                raise no_end(chat, number)
        return [*others, (start, end)]


def _plain_end(own: ChatTemplate) -> str:
    """What marks have behind an answer; empty where they have nothing there."""
    try:
        render = own.render([QUESTION, {"role": "assistant", "content": STAND_IN}])
    except Exception:  # templates are programs and fail in every way
        return ""
    stop = max((stop for _, _, stop in render.marks), default=0)
    _, found, end = render.text[:stop].rpartition(STAND_IN)
    return end.strip() if found else ""


def _begins_another(render: Render, number: int, place: int) -> bool:
    """What stands at a place of the text is another message's, its header for one."""
    owners = {owner for owner, rounds in render.rounds.items() if any(a <= place < b for a, b in rounds)}
    return bool(owners) and number not in owners


def _by_message(chat: Conversation, render: Render) -> Marks:
    """The marks of each assistant message: those in its rounds, else one each in order."""
    answers = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
    found: Marks = {number: [] for number in answers}
    marks: list[tuple[Any, int, int]] = [mark for mark in render.marks if mark[1] < mark[2]]
    for _, start, stop in marks:
        for number in answers:
            if any(a <= start and stop <= b for a, b in render.rounds.get(number, [])):
                found[number].append((start, stop))
    # An answer that says nothing may have none.
    has_all = all(spans or not chat.trains[number] for number, spans in found.items())
    if has_all and sum(map(len, found.values())) == len(marks):
        return found
    if len(marks) != len(answers):
        what = f"the template's marks enclose {len(marks)} parts, but there are {len(answers)} assistant messages"
        raise DataError(f"{what}. {ADVICE}")
    return {number: [(start, stop)] for number, (_, start, stop) in zip(answers, marks, strict=True)}
