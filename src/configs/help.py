"""`--help`: one panel per table of the config, with flag, type, default and doc of every key."""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from configs.base import BaseConfig
from configs.schema import TAG, Key, Slot, all_keys, dotted, slots, table_tags
from configs.values import describe

PLAIN_WIDTH = 110
"""Columns where the output is no terminal and COLUMNS is not set."""


def print_help(root: type[BaseConfig], prog: str) -> None:
    """Print the help of a config class to stdout; colours only on a terminal, and not with NO_COLOR."""
    is_terminal = sys.stdout.isatty()
    colours = is_terminal and not os.environ.get("NO_COLOR")
    console = Console(
        force_terminal=is_terminal,
        color_system="auto" if colours else None,
        no_color=not colours,
        highlight=False,
        width=None if is_terminal or "COLUMNS" in os.environ else PLAIN_WIDTH,
    )
    console.print(_usage(root, prog))
    flag_width = max(len(_flag(key)) for key in all_keys(root))
    for title, doc, table, above in _sections(root):
        console.print(_panel(title, doc, table, above, flag_width))


def _usage(root: type[BaseConfig], prog: str) -> Text:
    text = Text()
    text.append("Usage: ", style="bold")
    bare = f" {_positional(root)}" if root.positional is not None else ""
    text.append(f"{prog}{bare} [@ file.toml ...] [--key value ...]\n\n")
    text.append(f"{(root.__doc__ or '').strip()} Defaults < files from left to right < flags.\n\n")
    table = next((dotted(key) for key, _ in _tables_below(root, ())), None)
    for form, meaning in (
        ("@ a.toml @ b.toml", "lay files on top of each other; tables merge, lists and values replace"),
        *([(f"--{table} @ {table}.toml", "lay a file on top of one table")] if table is not None else []),
        ("--a.b 1, --a.b=1", "set a key; - and _ are the same"),
        ("--x, --no-x, --x false", "true or false; turn an optional block on or off"),
        ("--x 1 2, --x '[1, 2]'", "a list, also as JSON; tables as JSON"),
        ("--x None", "no value"),
    ):
        text.append(f"  {form:<30}", style="cyan")
        text.append(f"{meaning}\n")
    return text


def _positional(root: type[BaseConfig]) -> str:
    """How the arguments without a flag are shown: RUNS ..., or CHECKPOINT for one alone."""
    assert root.positional is not None
    name = root.positional.upper()
    return f"{name} ..." if slots(root)[root.positional].is_list else name


def _sections(root: type[BaseConfig]) -> Iterator[tuple[str, str, type[BaseModel], Key]]:
    """(title, doc, table, key) of every panel: the root, then each table, one panel per variant of a union."""
    yield "top level", "", root, ()
    pending = _tables_below(root, ())
    while pending:
        key, slot = pending.pop(0)
        for table in slot.tables:
            title = f"[{dotted(key)}]"
            if slot.is_union:
                title += f" {TAG} = {' or '.join(map(json.dumps, table_tags(table)))}"
                if slot.default_tag in table_tags(table):
                    title += " (default)"
            if slot.required:
                title += " (required)"
            if slot.optional:
                title += " (optional, off)" if slot.default is None else " (optional, on)"
            doc = " ".join((table.__doc__ or "").split()) if slot.is_union else slot.doc
            yield title, doc, table, key
            pending[:0] = _tables_below(table, key)


def _tables_below(table: type[BaseModel], above: Key) -> list[tuple[Key, Slot]]:
    return [((*above, name), slot) for name, slot in slots(table).items() if slot.tables]


def _panel(title: str, doc: str, table: type[BaseModel], above: Key, flag_width: int) -> Panel:
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0), expand=True)
    grid.add_column(width=flag_width, no_wrap=True)
    grid.add_column(ratio=2, overflow="fold")
    grid.add_column(ratio=3, overflow="fold")
    own = {name: slot for name, slot in slots(table).items() if not slot.tables and name != TAG}
    if len(table_tags(table)) == 1:
        flag = Text(_flag((*above, TAG)), style="cyan")
        grid.add_row(flag, Text(json.dumps(table_tags(table)[0])), Text("Picks these keys."))
    for name, slot in own.items():
        grid.add_row(Text(_flag((*above, name)), style="cyan"), _type_and_default(slot), Text(slot.doc))
    body = Group(Text(doc, style="italic"), grid) if doc else grid
    return Panel(body, title=Text(title, style="bold"), title_align="left", box=box.ROUNDED)


def _flag(key: Key) -> str:
    return f"--{dotted(key).replace('_', '-')}"


def _type_and_default(slot: Slot) -> Text:
    text = Text(describe(slot))
    if slot.required:
        return text.append("\nrequired", style="bold")
    return text.append(f"\n= {_default(slot.default)}", style="green")


def _default(value: Any) -> str:
    return "None" if value is None else json.dumps(value, default=str)
