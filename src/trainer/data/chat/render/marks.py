"""Chat templates, rendered as transformers renders them, with the places of what they write.

The places come from the render itself. Jinja's compiled templates hand out their text piece by piece, so where a
`{% generation %}` mark opens and closes, or a round of a loop over messages begins and ends, is a number of pieces.
Nothing is searched for, and a text that occurs twice has two places.
"""

import datetime
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MARK = "mark_of_generation"
_ROUND = "round_of_loop"
# In these Jinja collects text before it hands it out: a count of pieces says nothing about places inside them.
_COLLECTING = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)


Span = tuple[int, int]
"""Start and stop in a text."""


class RefusedError(jinja2.TemplateError):
    """The template called `raise_exception`: it does not take these messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Render:
    """One text of a template."""

    text: str

    marks: list[tuple[Any, int, int]]
    """What the mark says of itself (the number of a message in shipped templates, else None), start and stop in
    `text`, in the order of the closing marks."""

    rounds: dict[int, list[Span]]
    """By number of the message: what loops over messages wrote in its rounds, in order; empty ones are left out."""


class ChatTemplate:
    """A compiled template with the variables that are the same for every conversation."""

    def __init__(
        self, source: str, variables: dict[str, Any], date: datetime.date | None = None, *, traced: bool = True
    ) -> None:
        """Args:
            source: Jinja.
            variables: what it can read besides messages and tools.
            date: the day that it writes where it asks for today's.
            traced: note the rounds of its loops; that takes some time in every render.

        Raises:
            jinja2.TemplateError: it is no Jinja.
        """
        self.source = source
        self.date = date
        self.variables = variables
        environment = _environment(date)
        tree = environment.parse(source)
        self.reads = frozenset(jinja2.meta.find_undeclared_variables(tree)) - {_MARK}
        """Variables that it reads."""
        self.asks_date = any(name.name == "strftime_now" for name in tree.find_all(nodes.Name))
        """It may write today's date."""
        self.keys = _keys(tree)
        """Names of attributes, items and other constants in it: a key of a message that is not here is not read."""
        marks = len(_mark_nodes(tree))
        hidden = sum(len(_mark_nodes(outer)) for outer in tree.find_all(_COLLECTING))
        hidden += sum(len(_mark_nodes(loop)) for loop in tree.find_all(nodes.For) if loop.recursive)
        self.is_marked = marks > 0 and hidden == 0
        """It has marks, all where their places are exact."""
        if traced:
            _trace_loops(tree, count())
        self._template = environment.from_string(tree)

    @property
    def key(self) -> dict[str, Any]:
        """All that changes its text, besides the conversation."""
        return {"source": self.source, "variables": self.variables, "date": self.date and self.date.isoformat()}

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *, prompt: bool = False
    ) -> Render:
        """The text of a conversation.

        Args:
            messages: as templates get them.
            tools: descriptions of tools.
            prompt: ask for the start of an assistant message at the end (`add_generation_prompt`).

        Raises:
            RefusedError: the template refuses these messages.
            Exception: of any kind; templates are programs.
        """
        pieces: list[str] = []
        opened: list[tuple[Any, int]] = []
        closed: list[tuple[Any, int, int]] = []
        rounds: list[tuple[int, int, int]] = []

        def mark(about: Any, opens: bool) -> None:
            if opens:
                opened.append((about, len(pieces)))
            else:
                closed.append((*opened.pop(), len(pieces)))

        def begin_round(loop: int, item: Any) -> None:
            rounds.append((loop, id(item), len(pieces)))

        given: dict[str, Any] = {"messages": messages, "tools": tools, "documents": None}
        given |= {"add_generation_prompt": prompt, **self.variables, _MARK: mark, _ROUND: begin_round}
        for piece in self._template.generate(given):
            pieces.append(piece)
        places = list(accumulate(map(len, pieces), initial=0))
        return Render(
            text="".join(pieces),
            marks=[(about, places[start], places[stop]) for about, start, stop in closed],
            rounds=_written(rounds, messages, places),
        )


def _written(
    rounds: list[tuple[int, int, int]], messages: list[dict[str, Any]], places: list[int]
) -> dict[int, list[Span]]:
    """A round lasts until the next of its loop, or until the loop's end, which is marked like a round of None."""
    numbers = {id(message): number for number, message in enumerate(messages)}
    written: dict[int, list[Span]] = {}
    last: dict[int, tuple[int, int]] = {}
    for loop, item, place in rounds:
        if loop in last:
            number, start = last.pop(loop)
            if places[start] < places[place]:
                written.setdefault(number, []).append((places[start], places[place]))
        if item in numbers:
            last[loop] = numbers[item], place
    return written


def _trace_loops(node: nodes.Node, numbers: Iterator[int]) -> None:
    """Put a call at the start of each round of a loop and after the loop, in all statements below `node`."""
    for field in ("body", "else_", "elif_"):
        statements = getattr(node, field, None)
        if isinstance(statements, list):
            setattr(node, field, [traced for statement in statements for traced in _traced(statement, numbers)])


def _traced(node: nodes.Node, numbers: Iterator[int]) -> list[nodes.Node]:
    if isinstance(node, _COLLECTING):
        return [node]
    _trace_loops(node, numbers)
    if not isinstance(node, nodes.For) or node.recursive or not isinstance(node.target, nodes.Name):
        return [node]
    loop = nodes.Const(next(numbers))
    node.body.insert(0, _call(_ROUND, [loop, nodes.Name(node.target.name, "load")], node.lineno))
    return [node, _call(_ROUND, [loop, nodes.Const(None)], node.lineno)]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` and, with an expression, `{% generation loop.index0 %}`.

    The body stays in place, in a scope of its own as in transformers, where it is the body of a macro.
    """

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        bare = parser.stream.current.type == "block_end"
        about = nodes.Const(None) if bare else parser.parse_expression()
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opens = _call(_MARK, [about, nodes.Const(True)], line)
        closes = _call(_MARK, [nodes.Const(None), nodes.Const(False)], line)
        return [opens, nodes.Scope(body).set_lineno(line), closes]


def _call(function: str, arguments: list[nodes.Expr], line: int) -> nodes.Node:
    return nodes.ExprStmt(nodes.Call(nodes.Name(function, "load"), arguments, [], None, None)).set_lineno(line)


def _mark_nodes(tree: nodes.Node) -> list[nodes.Name]:
    return [name for name in tree.find_all(nodes.Name) if name.name == _MARK]


def _keys(tree: nodes.Template) -> frozenset[str]:
    constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(constants | {node.attr for node in tree.find_all(nodes.Getattr)})


def _environment(date: datetime.date | None) -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up: what a template does there it does here."""
    extensions = [_Generation, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "namespace": _Namespace, "dict": _table}
    environment.globals["strftime_now"] = _clock(date)
    return environment


def _clock(date: datetime.date | None) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        if date is None:
            raise ValueError("it asks for today's date, and renderer.date is not set")
        return datetime.datetime.combine(date, datetime.time()).strftime(form)

    return strftime_now


def _refuse(message: str) -> None:
    raise RefusedError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter of this name escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _table(*args: Any, **entries: Any) -> dict[Any, Any]:
    # The class itself would show a template its attributes.
    return dict(*args, **entries)


class _Namespace(Namespace):
    """Jinja's, without names that begin with an underscore: they would reach into Python."""

    def __init__(*args: Any, **entries: Any) -> None:
        self, *rest = args
        values = dict(*rest, **entries)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")
