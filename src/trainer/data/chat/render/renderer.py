"""From a conversation to its text, with the parts that carry loss.

The text is what the tokenizer's chat template (or `renderer.template`) writes. Where messages lie in it is found in the
first of these ways that is exact:

1. the template's own `{% generation %}` marks;
2. the marks of a shipped template that writes the same text, compared for every row;
3. strict prefix rendering, or the rounds of the template's loop over messages (`prefix`).

A row that none of them fits is refused: a mask is never guessed. In all of them an assistant's part starts after what a
model is given to answer (its header) and ends with the token that ends its turn; a line end after that is left out.
"""

from typing import TYPE_CHECKING, Any

from configs.renderer import RendererConfig
from trainer.data.chat.read.messages import reasoning_of
from trainer.data.chat.render.literals import ControlTokens
from trainer.data.chat.render.marks import ChatTemplate, RefusedError, Render, Span
from trainer.data.chat.render.options import open_templates
from trainer.data.chat.render.presence import check_presence
from trainer.data.chat.render.ways import choose_way
from trainer.data.chat.sample import Conversation, Rendered, UnusableError
from trainer.data.errors import DataError
from trainer.text import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VERSION = 1
"""Raised when the text or the spans of a conversation change, so that older caches are not taken for theirs."""


class Renderer:
    """Renders conversations with one tokenizer's template. Made anew in every process that uses one."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", config: RendererConfig, roles: frozenset[str] = frozenset()
    ) -> None:
        """Args:
            tokenizer: whose template and control tokens are used.
            config: `[renderer]`.
            roles: whose messages carry loss where they do not say so themselves.

        Raises:
            ConfigError: there is no template, it is no Jinja, it does not read an option, or it wants a date.
        """
        added = tokenizer.added_tokens_decoder.values()
        self._control = ControlTokens(token.content for token in added if token.special)
        self._roles = roles
        self._templates = open_templates(tokenizer, config)
        plain, with_tools = self._templates
        self._way = choose_way(plain, self._control, roles)
        self._way_with_tools = self._way if with_tools is plain else choose_way(with_tools, self._control, roles)

    @property
    def key(self) -> dict[str, Any]:
        """All that changes texts and spans."""
        templates = [template.key for template in self._templates]
        ways = [self._way.name, self._way_with_tools.name]
        return {"version": _VERSION, "templates": templates, "ways": ways, "tokens": list(self._control.tokens)}

    @property
    def description(self) -> str:
        """How the parts with loss are found."""
        if self._way_with_tools.name == self._way.name:
            return f"loss {self._way.name}"
        return f"loss {self._way.name}; with tools {self._way_with_tools.name}"

    def render(self, conversation: Conversation) -> Rendered:
        """The text of a conversation.

        Raises:
            UnusableError: the template refuses the conversation.
            DataError: the template leaves something out, fails, or gives no exact place to what carries loss.
        """
        chat = _with_names_of_reasoning(conversation)
        own, way = self._templates[0], self._way
        if chat.tools:
            own, way = self._templates[1], self._way_with_tools
        render = _render(own, chat)
        marks = way.marks(chat, render)
        check_presence(chat, render.text, render.rounds if marks is None else marks, own)
        spans = way.parts(chat, render, marks)
        literals: list[Span] = []
        if self._control.spelt_in(chat):
            literals = self._control.places(chat, render.text, lambda other: _render(own, other).text, own.source)
            _check_ends(spans, literals)
        return Rendered(text=render.text, loss_spans=_joined(spans), literal_spans=literals)


def _render(template: ChatTemplate, chat: Conversation) -> Render:
    try:
        return template.render(chat.messages, chat.tools)
    except RefusedError as error:
        raise UnusableError(f"the template refuses it: {first_line(error)[:200]}") from error
    except Exception as error:  # templates are programs and fail in every way
        raise DataError(f"the template fails on this row: {type(error).__name__}: {first_line(error)[:200]}") from error


def _with_names_of_reasoning(chat: Conversation) -> Conversation:
    """Reasoning under the names that templates read: transformers, too, gives it both."""
    if all(reasoning_of(message) is None for message in chat.messages):
        return chat
    messages = []
    for message in chat.messages:
        reasoning = reasoning_of(message)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        messages.append(message)
    return Conversation(messages=messages, tools=chat.tools, trains=chat.trains)


def _check_ends(spans: list[Span], literals: list[Span]) -> None:
    """What ends a turn is a token of the template, not what a message spells."""
    if {stop for _, stop in spans} & {stop for _, stop in literals}:
        what = "what a message that carries loss says ends with text that spells a control token"
        raise DataError(f"{what}, and the template adds none; take it out of the data")


def _joined(spans: list[Span]) -> list[Span]:
    """Spans that touch are one; empty ones are none."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif start < stop:
            joined.append((start, stop))
    return joined
