"""Notices that no rank moves any more, and finds out which of them the others wait for."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainer.flight_recorder import DUMP_SIGNAL, Collective, find_absences, read_collectives
from trainer.heartbeat import SLOW_PHASES, Beat, read_beat
from trainer.run import rank_collectives, rank_heartbeat, rank_log
from trainer.text import listed

SLOW_PHASE_SECONDS = 1800.0
"""What a phase that may take long gets on top: a first compilation on a busy machine, weights from a slow file server.
Ranks that wait for another one meanwhile are ended by their collective's own time-out."""

_LOOK_SECONDS = 0.5
_PAUSE_SECONDS = 60.0
"""When this process could not look for so long it was suspended, by SLURM for one, and the ranks may have been too."""

_ANSWER_SECONDS = 5.0
"""A rank that has not written its dump by then will not."""

_CLOCK_SECONDS = 60.0
"""How far the clocks of two machines may be apart."""

_STATES = {"T": "stopped by a signal", "t": "held by a debugger", "D": "waiting in the kernel, for a disk or a driver"}
"""Of a process, by the letter in /proc/<pid>/stat; others say nothing about a hang."""


class Watchdog:
    """Looks at the heartbeats of ranks.

    A rank moves when its heartbeat counts on, by this process's clock: those of machines differ. That one rank alone
    stands still need not be watched for, since the others soon wait for it.
    """

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        ranks: Sequence[int],
        timeout: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            ranks: those watched, of this machine.
            timeout: seconds without a sign from any of them after which they hang; in phases that may take long,
                SLOW_PHASE_SECONDS more.
        """
        self._run_dir, self._attempt, self._ranks = run_dir, attempt, list(ranks)
        self._timeout = timeout
        self._clock = clock
        self._beats: dict[int, Beat] = {}
        self._moved = self._looked = clock()

    def is_stuck(self) -> bool:
        """Whether no rank has moved for too long. To be asked often; looks twice a second."""
        now = self._clock()
        if now - self._looked < _LOOK_SECONDS:
            return False
        if now - self._looked > _PAUSE_SECONDS:
            self._moved += now - self._looked
        self._looked = now
        before, self._beats = self._beats, self._read(self._ranks)
        # Files that are gone, or cannot be written, say nothing of the ranks.
        if any(rank not in before or beat.number != before[rank].number for rank, beat in self._beats.items()):
            self._moved = now
        return bool(self._beats) and now - self._moved > self._patience()

    def _patience(self) -> float:
        slow = any(beat.phase in SLOW_PHASES for beat in self._beats.values())
        return self._timeout + (SLOW_PHASE_SECONDS if slow else 0.0)

    def ask(self, ranks: Iterable[int], send: Callable[[int, int], None]) -> None:
        """Have ranks of this machine dump stacks and collectives."""
        for rank in ranks:
            # Before its log is there, a worker would die of the signal.
            if rank_log(self._run_dir, self._attempt, rank).exists():
                send(rank, DUMP_SIGNAL)

    def examine(self, pids: Mapping[int, int], send: Callable[[int, int], None]) -> str:
        """Have ranks dump stacks and collectives, and say which of them hang. Takes some seconds.

        Args:
            pids: of the living ranks of this machine. The files of other machines' ranks are read too: their own
                launchers ask them.
            send: sends a rank a signal.
        """
        started = time.time()
        self.ask(pids, send)
        logs = rank_log(self._run_dir, self._attempt, 0).parent
        everyone = sorted({*self._ranks, *(int(path.stem[5:]) for path in logs.glob("rank_*.heartbeat"))})
        until = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < until and len(self._dumps(everyone, started)) < len(everyone):
            time.sleep(0.05)
        text = describe_hang(
            beats=self._read(everyone),
            dumps=self._dumps(everyone, started),
            states={rank: state for rank, pid in pids.items() if (state := process_state(pid))},
            asked=list(pids),
        )
        return f"{text}. Stacks of all threads are at the end of each rank's log in {logs}, collectives beside them"

    @property
    def seconds(self) -> float:
        """Since a rank moved."""
        return self._clock() - self._moved

    def _read(self, ranks: Sequence[int]) -> dict[int, Beat]:
        beats = {rank: read_beat(rank_heartbeat(self._run_dir, self._attempt, rank)) for rank in ranks}
        return {rank: beat for rank, beat in beats.items() if beat is not None}

    def _dumps(self, ranks: Sequence[int], since: float) -> dict[int, list[Collective]]:
        dumps = {}
        for rank in ranks:
            path = rank_collectives(self._run_dir, self._attempt, rank)
            with suppress(OSError):
                if (
                    path.stat().st_mtime >= since - _CLOCK_SECONDS
                    and (collectives := read_collectives(path)) is not None
                ):
                    dumps[rank] = collectives
        return dumps


def process_state(pid: int) -> str:
    """What the kernel says of a process, where that explains a hang; else empty."""
    try:
        return _STATES.get(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0], "")
    except (OSError, IndexError):
        return ""


def describe_hang(
    *,
    beats: Mapping[int, Beat],
    dumps: Mapping[int, Sequence[Collective]],
    states: Mapping[int, str],
    asked: Sequence[int],
) -> str:
    """Which ranks hang, and what the others wait in.

    Args:
        beats: last sign of every rank.
        dumps: collectives of the ranks that answered.
        states: of processes, where that says something.
        asked: ranks of this machine, which should have answered; those of others may not have been asked yet.
    """
    absences = find_absences(dumps)
    waiting = {rank for absence in absences for rank in absence.waiting}
    behind = {rank for absence in absences for rank in absence.absent}
    silent = {rank for rank in asked if rank not in dumps}
    # Who is behind in one group may be waiting in another one, for somebody else.
    hanging = silent | {rank for rank in states if "stopped" in states[rank]} or behind - waiting or behind
    elsewhere = set(beats) - set(dumps) - set(asked)
    if not hanging and len(elsewhere) < len(beats):
        hanging, silent = elsewhere, elsewhere
    if not hanging:  # no collective tells them apart: all came, or there is only one rank
        hanging = set(beats)
    sentences = [_ranks_hang(hanging, beats, states, silent)]
    others = sorted(set(beats) - hanging)
    if others:
        sentences.append(_ranks_wait(others, beats, dumps, absences))
    return "; ".join(sentences)


def _ranks_hang(ranks: set[int], beats: Mapping[int, Beat], states: Mapping[int, str], silent: set[int]) -> str:
    alike: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        notes = [str(beats[rank]) if rank in beats else "no sign yet"]
        if rank in states:
            notes.append(states[rank])
        elif rank in silent:
            notes.append("does not answer")
        alike[", ".join(notes)].append(rank)
    return "; ".join(f"{name_ranks(group, 'hang')} ({what})" for what, group in alike.items())


def _ranks_wait(ranks: Sequence[int], beats: Mapping[int, Beat], dumps: Mapping, absences: Sequence) -> str:
    alike: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        missed = [absence.collective for absence in absences if rank in absence.waiting]
        if not missed and dumps.get(rank):
            missed = [dumps[rank][-1]]
        place = f" in {missed[-1]}" if missed else ""
        alike[f"{place} ({beats[rank]})"].append(rank)
    return "; ".join(f"{name_ranks(group, 'wait')}{what}" for what, group in alike.items())


def name_ranks(ranks: Sequence[int], verb: str) -> str:
    """`rank 3 hangs`, `ranks 1, 5 hang`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {verb}s"
    return f"ranks {listed([str(rank) for rank in ranks], 8)} {verb}"
