"""Faults of a config: what is wrong, at which key. The command turns them into one message each and exit code 2."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault."""

    key: str
    """Full dotted key as in TOML (`data.paths`), or "" when it is about the whole config."""

    message: str
    """What is wrong and what to do."""

    origin: str = ""
    """The file or flag that gave the value ("a.toml", "flag --max-steps"), where that is known."""


class ConfigError(Exception):
    """A config that cannot run, with every fault found."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("; ".join(f"{fault.key}: {fault.message}" if fault.key else fault.message for fault in faults))
        self.faults = faults

    @classmethod
    def one(cls, key: str, message: str) -> "ConfigError":
        return cls([Fault(key=key, message=message)])


@contextmanager
def collecting(faults: list[Fault]) -> Generator[None]:
    """Go on after a ConfigError, keeping those of its faults that are new: one start then names all of them."""
    try:
        yield
    except ConfigError as error:
        faults.extend(fault for fault in error.faults if fault not in faults)
