"""Which collectives each rank has come to, by torch's flight recorder, and what that says of ranks that hang.

The recorder keeps the last collectives of a process in memory, of NCCL and of gloo. Asked by a signal, a worker writes
its record into a file and the stacks of all its threads into its log; `find_absences` compares those of all ranks.
gloo's entries do not say whether a collective has ended, so only their numbers are used: in one group, every rank
counts its collectives alike, and a rank whose count is behind has not come to what the others are in.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

DUMP_SIGNAL = signal.SIGUSR2

_BUFFER_ENTRIES = 2000


def recorder_environment(logs: Path) -> dict[str, str]:
    """Variables for workers: the recorder is on, and NCCL writes its own dumps beside the logs.

    What the user has set stays.
    """
    wanted = {
        "TORCH_FR_BUFFER_SIZE": str(_BUFFER_ENTRIES),
        "TORCH_FR_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(logs / "nccl_dump_rank_"),
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def answer_dump_signals(log: TextIO, path: Path) -> None:
    """From now on DUMP_SIGNAL makes this process write its stacks into its log, and its collectives to `path`.

    Both work while the main thread waits in a collective: the stacks are written by the signal's own handler, and the
    record by a thread that Python's C handler wakes. In the main thread only.
    """
    asked, ask = os.pipe()
    os.set_blocking(ask, False)
    signal.signal(DUMP_SIGNAL, lambda signum, frame: None)  # so that a byte is written to the pipe
    signal.set_wakeup_fd(ask, warn_on_full_buffer=False)
    faulthandler.register(DUMP_SIGNAL, file=log, all_threads=True, chain=True)

    def answer() -> None:
        while signals := os.read(asked, 64):
            if DUMP_SIGNAL in signals:
                dump_collectives(path)

    threading.Thread(target=answer, name="dump signals", daemon=True).start()


def dump_collectives(path: Path) -> None:
    """Write what the recorder has, as JSON. A disk that takes nothing more is no reason for another failure."""
    entries: list[dict[str, Any]] = []
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")  # absent until torch is imported: nothing to record
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            with suppress(RuntimeError, ValueError):
                entries += json.loads(dump()).get("entries", [])
    new = path.with_suffix(".new")
    with suppress(OSError):
        new.write_text(json.dumps({"entries": entries}))
        new.replace(path)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One of the collectives that a rank came to."""

    name: str
    """As the recorder calls it: "gloo:all_reduce"."""

    group: tuple[str, str]
    """Name and description of the process group."""

    number: int
    """Which of its group's collectives, from 1."""

    def __str__(self) -> str:
        name, description = self.group
        what = {"default_pg": "all ranks", "undefined": f"group {name}"}.get(description, f"group {description}")
        return f"{self.name} (number {self.number} of {what})"


@dataclass(frozen=True, kw_only=True)
class Absence:
    """A collective that some ranks came to and others of its group did not."""

    collective: Collective
    waiting: tuple[int, ...]
    absent: tuple[int, ...]


def read_collectives(path: Path) -> list[Collective] | None:
    """The last collective that a rank came to in each group, the newest at the end; None if there is no dump."""
    try:
        entries = json.loads(path.read_bytes())["entries"]
    except (OSError, ValueError, KeyError):
        return None
    last: dict[tuple[str, str], Collective] = {}
    for entry in sorted(entries, key=lambda entry: entry["time_created_ns"]):
        if entry["is_p2p"]:
            continue  # counted by the pair of ranks
        name, description = entry["process_group"]
        group = (name, description)
        last.pop(group, None)
        last[group] = Collective(name=entry["profiling_name"], group=group, number=entry["collective_seq_id"])
    return list(last.values())


def find_absences(dumps: Mapping[int, Sequence[Collective]]) -> list[Absence]:
    """What ranks wait for, as far as the dumps tell.

    Args:
        dumps: what `read_collectives` gave, by rank. A rank belongs to the group of all ranks, and to the others that
            it has used.
    """
    groups = dict.fromkeys(collective.group for collectives in dumps.values() for collective in collectives)
    absences = []
    for group in groups:
        last = {
            rank: next((collective for collective in collectives if collective.group == group), None)
            for rank, collectives in dumps.items()
        }
        numbers = {
            rank: 0 if collective is None else collective.number
            for rank, collective in last.items()
            if collective is not None or group[1] == "default_pg"
        }
        most = max(numbers.values())
        waiting = tuple(rank for rank, number in numbers.items() if number == most)
        absent = tuple(rank for rank, number in numbers.items() if number < most)
        collective = last[waiting[0]]
        if absent and collective is not None:
            absences.append(Absence(collective=collective, waiting=waiting, absent=absent))
    return absences
