"""The command line as settings: which files, which flags, which values. Needs the config class to know what a flag
takes: a block may stand alone, a list takes several values, a number takes one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.base import BaseConfig
from configs.errors import Fault
from configs.files import ReadError, is_utf8
from configs.nearest import did_you_mean, nearest_keys
from configs.schema import Key, Slot, dotted, find_slot, slots
from configs.values import parse_flag


@dataclass(frozen=True, kw_only=True)
class FileArgument:
    """`@ path`, or `--model @ path` with a key."""

    path: str
    key: Key = ()


@dataclass(frozen=True, kw_only=True)
class FlagArgument:
    """A flag and its value."""

    key: Key
    value: Any
    flag: str
    """As it was typed, without the value: "--max-steps"."""


@dataclass
class Arguments:
    """What the command line holds, in its order."""

    files: list[FileArgument] = field(default_factory=list)
    flags: list[FlagArgument] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def wants_help(argv: Sequence[str]) -> bool:
    return any(argument in ("--help", "-h") for argument in argv)


def parse_argv(argv: Sequence[str], root: type[BaseConfig]) -> Arguments:
    """The files and flags of `argv`; what cannot be understood becomes a fault each."""
    out = Arguments()
    bare: list[str] = []
    pending = list(argv)
    while pending:
        argument = pending.pop(0)
        if not is_utf8(argument):
            out.faults.append(Fault(key="", message=f"argument {argument!a} is not UTF-8 text"))
        elif argument.startswith("@"):
            _take_file(argument, pending, (), out)
        elif argument.startswith("--") and len(argument) > 2:
            _take_flag(argument, pending, root, out)
        elif argument.startswith("-"):
            out.faults.append(Fault(key="", message=f"unknown option {argument!r}: flags start with -- and a name"))
        elif root.positional is not None:
            bare.append(argument)
        else:
            hint = f"; for a file write @ {argument}" if argument.lower().endswith((".toml", ".json")) else ""
            message = f"stray argument {argument!r}: values follow a flag, files an @{hint}"
            out.faults.append(Fault(key="", message=message))
    if bare and root.positional is not None:
        _take_bare(bare, root, root.positional, out)
    return out


def _take_bare(texts: list[str], root: type[BaseConfig], name: str, out: Arguments) -> None:
    """Arguments without a flag are the values of the field that the command names for them."""
    slot = slots(root)[name]
    if len(texts) > 1 and not slot.is_list:
        message = f"stray argument {texts[1]!r}: {texts[0]!r} is the one {name.replace('_', ' ')} already"
        out.faults.append(Fault(key="", message=message))
        texts = texts[:1]  # it is not missing
    flag = _flag_of(name)
    try:
        out.flags.append(FlagArgument(key=(name,), value=parse_flag(slot, texts), flag=flag))
    except ReadError as error:
        out.faults.append(Fault(key=name, message=str(error), origin=f"flag {flag}"))


def _is_value(argument: str) -> bool:
    """Not a flag and not a file; a negative number is a value."""
    if argument.startswith("-"):
        return re.fullmatch(r"-(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?|-inf|-nan", argument, re.ASCII) is not None
    return not argument.startswith("@") and is_utf8(argument)


def _take_file(argument: str, pending: list[str], key: Key, out: Arguments) -> None:
    path = argument[1:]
    if not path:
        if not pending or pending[0].startswith(("--", "@")) or not is_utf8(pending[0]):
            out.faults.append(Fault(key=dotted(key), message="@ needs the name of a file after it"))
            return
        path = pending.pop(0)
    out.files.append(FileArgument(path=path, key=key))


def _take_flag(argument: str, pending: list[str], root: type[BaseConfig], out: Arguments) -> None:
    flag, equals, text = argument.partition("=")
    origin = f"flag {flag}"
    key, slot, negated = _resolve(flag, root)

    def fault(message: str) -> None:
        out.faults.append(Fault(key=dotted(key), message=message, origin=origin))

    if slot is None:
        while not equals and pending and _is_value(pending[0]):
            pending.pop(0)
        fault(f"unknown flag{did_you_mean(_nearest_flags(root, key))}")
    elif negated:
        if equals:
            fault(f"{flag} takes no value")
        elif bool not in slot.members and not slot.optional:
            fault("cannot be switched off: it is neither true or false nor an optional block")
        else:
            out.flags.append(FlagArgument(key=key, value=None if slot.optional else False, flag=flag))
    elif not equals and pending and pending[0].startswith("@") and (slot.tables or slot.is_open):
        _take_file(pending.pop(0), pending, key, out)
    else:
        texts = [text] if equals else _take_values(slot, pending)
        try:
            out.flags.append(FlagArgument(key=key, value=_value(slot, texts), flag=flag))
        except ReadError as error:
            fault(str(error))


def _resolve(flag: str, root: type[BaseConfig]) -> tuple[Key, Slot | None, bool]:
    """Key and slot of a flag, and whether it is the `--no-` form. The slot is None for an unknown one."""
    key = tuple(part.replace("-", "_") for part in flag[2:].split("."))
    slot = find_slot(root, key)
    if slot is None and key[0].startswith("no_"):
        positive = (key[0].removeprefix("no_"), *key[1:])
        if (slot := find_slot(root, positive)) is not None:
            return positive, slot, True
    return key, slot, False


def _nearest_flags(root: type[BaseConfig], key: Key) -> list[str]:
    level = find_slot(root, key[:-1])
    siblings = {name for table in level.tables for name in slots(table)} if level is not None else set()
    if len(key) > 1 and key[-1].startswith("no_"):
        # Written inside the dotted name; "no" comes before all of it.
        positive = (*key[:-1], key[-1].removeprefix("no_"))
        if find_slot(root, positive) is not None:
            return [f"--no-{_flag_of(dotted(positive))[2:]}"]
    if level is None and len(key) > 1:
        # The section is unknown: correct that first, then look for the name in it.
        sections = nearest_keys(root, key[:1], slots(root))
        corrected = [(*section.split("."), *key[1:]) for section in sections]
        found = [candidate for candidate in corrected if find_slot(root, candidate) is not None]
        if found:
            return [_flag_of(dotted(candidate)) for candidate in found]
    return [_flag_of(name) for name in nearest_keys(root, key, sorted(siblings))]


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _take_values(slot: Slot, pending: list[str]) -> list[str]:
    many = slot.is_list or slot.members == (Any,)
    texts: list[str] = []
    while pending and _is_value(pending[0]) and (many or not texts):
        texts.append(pending.pop(0))
    return texts


def _value(slot: Slot, texts: list[str]) -> Any:
    if not texts and slot.members == (bool,):
        return True
    if not texts and slot.optional and (slot.tables or slot.is_open) and Any not in slot.members:
        return {}
    if not texts and slot.tables:
        raise ReadError("needs a value: a JSON table, or @ and a file")
    if not texts or (texts == [""] and str not in slot.members):
        raise ReadError("needs a value")
    return parse_flag(slot, texts)
