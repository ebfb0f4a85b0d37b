"""Why an attempt failed: what launchers find out, tell those of other nodes, and raise in the end."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from configs.errors import ConfigError, Fault
from trainer.errors import RunError


class WorkerError(Exception):
    """A worker ended for a reason that nobody foresaw. The text has its rank, its log and its traceback."""


class KilledError(Exception):
    """A signal ended the run before its workers had stopped by themselves."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


ENDED = -1
CRASHED = 0
OWN = 1
FOLLOWED = 2
"""What a failure weighs as the cause of others: workers were killed after a signal; nothing of what a peer does brings
it about; it may have its own cause; it may have followed from another one."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One failure, as something that can be sent."""

    kind: Literal["config", "run", "worker", "killed"]
    message: str
    time: float
    """By the clock of its machine, seconds since 1970."""

    weight: int = OWN
    faults: tuple[Fault, ...] = ()
    """Of kind "config"."""

    signum: int = 0
    """Of kind "killed"."""

    def error(self) -> Exception:
        """What to raise."""
        match self.kind:
            case "config":
                return ConfigError(list(self.faults))
            case "run":
                return RunError(self.message)
            case "killed":
                return KilledError(self.signum, self.message)
            case "worker":
                return WorkerError(self.message)

    def dump(self) -> str:
        """As JSON, for `load_failure`."""
        return json.dumps(asdict(self))


def load_failure(text: str) -> Failure:
    """What `Failure.dump` gave."""
    record = json.loads(text)
    return Failure(**record | {"faults": tuple(Fault(**fault) for fault in record["faults"])})


def failure_of(error: Exception, *, time: float, weight: int = OWN) -> Failure:
    """An error that a launcher may end with, as a failure; of others, their text."""
    match error:
        case ConfigError():
            return Failure(kind="config", message="", faults=tuple(error.faults), time=time, weight=weight)
        case RunError():
            return Failure(kind="run", message=str(error), time=time, weight=weight)
        case KilledError():
            return Failure(kind="killed", message=str(error), signum=error.signum, time=time, weight=ENDED)
        case WorkerError():
            return Failure(kind="worker", message=str(error), time=time, weight=weight)
        case _:
            message = f"{type(error).__name__}: {error}"
            return Failure(kind="worker", message=message, time=time, weight=weight)


def first_cause(failures: list[Failure]) -> Failure | None:
    """The failure that the others followed from."""
    return min(failures, key=lambda failure: (failure.weight, failure.time), default=None)
