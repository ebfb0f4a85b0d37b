"""Rows and counts for people: text with the loss in colours or in marks, tables, a histogram.

Rendering knows rows only, not where they come from. A token of the text counts as a target where the position before
it has it as label; a label that is not the next token of the row (the last one always) stands behind an arrow.
Nothing in the data reaches the terminal as a control character.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

import numpy as np

from configs.safe_text import one_line
from models.batch import IGNORE_INDEX
from trainer.inspect.chats import Origin
from trainer.inspect.rows import Selection, ShownRow
from trainer.inspect.token_text import TokenText
from trainer.text import listed

_BORDER = "─── "
_TARGET = "→"
_LINE_END = "↵"
_MOST_ROLES = 8


class State(Enum):
    """What a token is to the loss."""

    LOSS = "loss"
    NO_LOSS = "no loss"
    PADDING = "padding"


@dataclass(frozen=True, kw_only=True)
class Token:
    """A piece of a row's text, ready to show."""

    text: str
    state: State
    control: bool


@dataclass(frozen=True, kw_only=True)
class Style:
    """How states, control tokens and borders look."""

    colours: bool

    def legend(self) -> str:
        samples = (
            Token(text="target with loss", state=State.LOSS, control=False),
            Token(text="no loss", state=State.NO_LOSS, control=False),
            Token(text="padding", state=State.PADDING, control=False),
            Token(text="control token", state=State.LOSS, control=True),
        )
        shown = ", ".join(map(self.paint, samples))
        return f"{shown}; {_TARGET} target beyond its document or row, {_LINE_END} line end"

    def paint(self, token: Token) -> str:
        """The text of a run of tokens as it goes to the terminal; colours end with every line."""
        if not self.colours:
            text = f"⟦{token.text}⟧" if token.control else token.text
            return {State.LOSS: text, State.NO_LOSS: f"⟨{text}⟩", State.PADDING: f"«{text}»"}[token.state]
        code = {State.LOSS: "32", State.NO_LOSS: "90", State.PADDING: "34"}[token.state]
        code = f"7;{code}" if token.control else code
        return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line else "" for line in token.text.split("\n"))

    def border(self, text: str) -> str:
        return f"\x1b[36m{_BORDER}{text}\x1b[0m" if self.colours else f"{_BORDER}{text}"


def render_selection(selection: Selection, texts: TokenText, style: Style, *, table: bool) -> Iterator[str]:
    """The lines (or groups of lines) to print."""
    if selection.step is not None:
        yield f"step {selection.step}: digest/rows {selection.digest}"
    if selection.rows:
        yield style.legend()
    for row in selection.rows:
        yield ""
        yield from _render_row(row, texts, style, table)


def row_states(row: ShownRow) -> list[State]:
    """What each input token is as a target of the position before it."""
    is_target = np.zeros(len(row.input_ids), np.bool_)
    is_target[1:] = row.labels[:-1] == row.input_ids[1:]
    states = [State.LOSS if target else State.NO_LOSS for target in is_target.tolist()]
    begin = len(states) - row.num_padding
    return states[:begin] + [State.PADDING] * row.num_padding


def _render_row(row: ShownRow, texts: TokenText, style: Style, table: bool) -> Iterator[str]:
    place = f"row {row.place} of the step" if row.place is not None else f"row {row.index}"
    count = len(row.segment_lengths)
    yield (
        f"{place} (epoch {row.epoch}, index {row.index}): {len(row.input_ids)} tokens in {count} "
        f"segment{'s' * (count > 1)}, {row.num_loss_tokens} with loss, {row.num_padding} padding"
    )
    states = row_states(row)
    ends = np.cumsum(row.segment_lengths).tolist()
    for number, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        positions = row.position_ids[begin:end]
        loss = int((row.labels[begin:end] != IGNORE_INDEX).sum())
        border = f"positions {positions[0]} to {positions[-1]}, {loss} of {end - begin} labels carry loss"
        if number < len(row.origins):
            border += f"; {_origin_text(row.origins[number], end - begin)}"
        yield style.border(border)
        if states[begin] is State.PADDING and not table:
            yield style.paint(Token(text=f"{end - begin} tokens of padding", state=State.PADDING, control=False))
            continue
        pieces = texts.pieces(row.input_ids[begin:end].tolist())
        if table:
            yield from _render_table(row, begin, pieces, states, texts)
        else:
            yield "".join(_segment_text(row, begin, pieces, states, texts, style))


def _origin_text(origin: Origin, length: int) -> str:
    """`chats.jsonl, line 12: system, user, assistant`."""
    text = f"{one_line(origin.place)}: {listed(origin.roles, most=_MOST_ROLES)}"
    if length < origin.num_tokens:
        last = origin.first_token + length - 1
        text += f"; tokens {origin.first_token:,} to {last:,} of {origin.num_tokens:,}"
    return text


def _segment_text(
    row: ShownRow, begin: int, pieces: list[str], states: list[State], texts: TokenText, style: Style
) -> Iterator[str]:
    tokens = []
    for at, piece in enumerate(pieces, begin):
        control = texts.is_control(int(row.input_ids[at]))
        tokens.append(Token(text=_visible(piece), state=states[at], control=control))
        beyond = _beyond(row, at)
        if beyond is not None:
            text = _TARGET + _visible(texts.pieces([beyond])[0])
            tokens.append(Token(text=text, state=State.LOSS, control=texts.is_control(beyond)))
    for (state, control), run in groupby(tokens, key=lambda token: (token.state, token.control)):
        run = list(run)
        for text in [token.text for token in run] if control else ["".join(token.text for token in run)]:
            if text:
                yield style.paint(Token(text=text, state=state, control=control))


def _beyond(row: ShownRow, at: int) -> int | None:
    """The label at a position, where it is a target that does not follow in the row."""
    label = int(row.labels[at])
    follows = at + 1 < len(row.labels) and label == int(row.input_ids[at + 1])
    return None if label == IGNORE_INDEX or follows else label


def _render_table(row: ShownRow, begin: int, pieces: list[str], states: list[State], texts: TokenText) -> Iterator[str]:
    """A line per token: the label with its text, as the loss sees it."""
    yield f"{'position':>8} {'id':>7} {'label':>7}  {'as target':<9}  text"
    for at, piece in enumerate(pieces, begin):
        label = int(row.labels[at])
        beyond = _beyond(row, at)
        text = one_line(piece) if texts.is_control(int(row.input_ids[at])) else repr_text(piece)
        if beyond is not None:
            text += f"  {_TARGET} {repr_text(texts.pieces([beyond])[0])}"
        shown = "-" if label == IGNORE_INDEX else str(label)
        yield (f"{row.position_ids[at]:>8} {row.input_ids[at]:>7} {shown:>7}  {states[at].value:<9}  {text}")


def repr_text(text: str) -> str:
    """In quotes, on one line."""
    return f"'{one_line(text)}'"


def _visible(text: str) -> str:
    """Line ends shown and kept; every other character that a terminal would obey as an escape."""
    return f"{_LINE_END}\n".join(one_line(line) for line in text.split("\n"))
