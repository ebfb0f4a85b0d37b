"""How the launchers of other nodes find node 0: by a file in the run directory, which all of them see."""

import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.errors import RunError
from trainer.failures import Failure, load_failure
from trainer.files import write_whole
from trainer.peers.store import Meeting, join_meeting

_LOOK_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Notice:
    """What node 0 puts up once the attempt is laid out."""

    attempt: int
    host: str
    """Name of its machine, by its own word."""

    addresses: tuple[str, ...]
    """Under which other machines may reach it, the likeliest first."""

    port: int
    token: str


def put_up(path: Path, meeting: Meeting, *, attempt: int, node_name: str) -> None:
    """Say where node 0 is.

    Args:
        path: of the notice.
        node_name: what the cluster calls this machine.

    Raises:
        OSError: the file cannot be written.
    """
    host = socket.gethostname()
    addresses = dict.fromkeys(name for name in (node_name, host, _outward_address()) if name)
    notice = Notice(attempt=attempt, host=host, addresses=tuple(addresses), port=meeting.port, token=meeting.token)
    write_whole(path, json.dumps({"notice": asdict(notice)}).encode())


def put_up_failure(path: Path, failure: Failure) -> None:
    """Say that node 0 cannot begin, and why. Nobody is to wait for it."""
    with suppress(OSError):
        write_whole(path, json.dumps({"failure": failure.dump()}).encode())


def find_host(
    path: Path, *, node_rank: int, num_nodes: int, seconds: float, say: Callable[[str], None]
) -> tuple[Meeting, int]:
    """Wait for node 0's notice and connect to it.

    Args:
        path: of the notice.
        seconds: how long to wait.
        say: told what the wait is for, if it is long.

    Returns:
        the meeting, and the attempt.

    Raises:
        RunError: node 0 did not begin in time, or cannot be reached.
        Exception: what node 0 failed of.
    """
    end, has_said = time.monotonic() + seconds, False
    while True:
        notice = _read(path)
        if isinstance(notice, Failure):
            raise notice.error()
        if notice is not None:
            # Names of machines mean little on one that tests or a container call anything.
            local = ("localhost",) if notice.host == socket.gethostname() else ()
            addresses = (*local, *notice.addresses)
            meeting = join_meeting(addresses, notice.port, notice.token, node_rank=node_rank, num_nodes=num_nodes)
            if meeting is not None:
                return meeting, notice.attempt
        if time.monotonic() > end:
            raise RunError(_not_found(path, notice, seconds))
        if not has_said:
            has_said = True
            say(f"waiting for node 0 to begin: {path}")
        time.sleep(_LOOK_SECONDS)


def _read(path: Path) -> Notice | Failure | None:
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    if "failure" in record:
        return load_failure(record["failure"])
    fields = record["notice"]
    return Notice(**fields | {"addresses": tuple(fields["addresses"])})


def _not_found(path: Path, notice: Notice | None, seconds: float) -> str:
    if notice is None:
        return (
            f"node 0 did not begin within {seconds:g} s: there is no {path}; the log of node 0 may tell why (the run "
            "directory must be on storage that all nodes share)"
        )
    where = _either([f"{address}:{notice.port}" for address in notice.addresses])
    return (
        f"node 0 ({notice.host}) cannot be reached at {where} within {seconds:g} s: it ended, or a firewall is between"
    )


def _either(names: Sequence[str]) -> str:
    return " or ".join(names)


def _outward_address() -> str:
    """The address by which this machine would talk to a private network; empty where it has no way to any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("10.255.255.255", 9))  # sends nothing
        return probe.getsockname()[0]
    return ""
