"""The command line of a config class: `@` files and flags in, one checked config out.

    uv run sft @ base.toml @ long.toml --data.type fake --max-steps 10 --no-ckpt

Defaults < files from left to right < flags. See docs/config.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from configs.argv import FileArgument, parse_argv, wants_help
from configs.base import BaseConfig
from configs.errors import ConfigError, Fault
from configs.faults import build_config
from configs.files import ReadError, read_layer
from configs.layers import MergedLayers, file_layer, find_origin, flag_layer
from configs.safe_text import one_line, star_secrets
from configs.schema import dotted
from configs.sft import SFTConfig

C = TypeVar("C", bound=BaseConfig)

_MAX_FAULTS = 100
"""More lines push the first ones, which tell most, off the terminal."""

_MAX_KEY = 120
_MAX_MESSAGE = 4000


@dataclass(frozen=True, kw_only=True)
class Resolved(Generic[C]):
    """A config and where it came from."""

    config: C

    origins: dict[str, str]
    """Full dotted key -> "a.toml" or "flag --max-steps", for each value that a file or flag gave."""

    notes: list[str]
    """What is worth saying: keys dropped because a later layer picked another `type`."""


def resolve(argv: Sequence[str], cls: type[C] = SFTConfig, prog: str = "sft") -> Resolved[C]:
    """The config that the command line describes.

    Raises:
        ConfigError: with every fault found.
        SystemExit: 0, after printing the help for `--help` or `-h`.
    """
    if wants_help(argv):
        # rich is only loaded where it is needed: every worker imports this module.
        from configs.help import print_help

        print_help(cls, prog)
        raise SystemExit(0)
    arguments = parse_argv(argv, cls)
    merged = MergedLayers(root=cls)
    unread = [fault for file in arguments.files for fault in _add_file(merged, file)]
    layer, contradictions = flag_layer(arguments.flags)
    faults = arguments.faults + unread + contradictions
    if unread:
        # What the file would have given looks missing now: further faults would mislead.
        raise ConfigError(faults)
    merged.add(layer)
    try:
        config = build_config(cls, merged.values, merged.origins)
    except ConfigError as error:
        raise ConfigError(faults + error.faults) from None
    if not faults:
        faults = [_with_origin(fault, merged) for fault in config.run_faults()]
    if faults:
        raise ConfigError(faults)
    origins = {dotted(key): origin for key, origin in merged.origins.items()}
    return Resolved(config=config, origins=origins, notes=merged.notes)


def render_error(error: ConfigError, origins: Mapping[str, str] | None = None) -> str:
    """One line per fault: `key (from file): message`, the first hundred of them.

    Characters that a terminal would obey are shown as escapes, secrets as ***.

    Args:
        error: from `resolve`, or from a later check of the same config.
        origins: `Resolved.origins`, for the faults of later checks; those of `resolve` bring their own.
    """
    keys = {tuple(key.split(".")): origin for key, origin in (origins or {}).items()}
    lines = []
    for fault in error.faults[:_MAX_FAULTS]:
        origin = fault.origin or (find_origin(keys, tuple(fault.key.split("."))) if fault.key else "")
        key = _cut(star_secrets(fault.key), _MAX_KEY)
        where = f"{key} ({origin}): " if key and origin else f"{key}: " if key else ""
        lines.append(one_line(where + _cut(star_secrets(fault.message), _MAX_MESSAGE)))
    if len(error.faults) > _MAX_FAULTS:
        lines.append(f"and {len(error.faults) - _MAX_FAULTS} more faults")
    return "\n".join(lines)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _add_file(merged: MergedLayers, file: FileArgument) -> list[Fault]:
    """Put a file on top; the fault if it cannot be read."""
    try:
        values = read_layer(file.path)
    except ReadError as error:
        return [Fault(key=dotted(file.key), message=str(error))]
    merged.add(file_layer(file.path, file.key, values))
    return []


def _with_origin(fault: Fault, merged: MergedLayers) -> Fault:
    origin = fault.origin or find_origin(merged.origins, tuple(fault.key.split(".")))
    return Fault(key=fault.key, message=fault.message, origin=origin)
