"""Which of a node's ranks failed first, by exit codes and by what the ranks themselves left word of."""

import json
import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import Fault
from trainer.attempts import Attempt
from trainer.failures import CRASHED, FOLLOWED, OWN, Failure
from trainer.run import STOP_SIGNALS, rank_error, rank_log

OF_OTHERS = ("peer", "timeout")
"""Kinds of reports that tell of another rank's failure."""

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGKILL)
"""Signals that no peer's failure brings about. SIGABRT is none: NCCL aborts a process whose peer is gone."""

_LOG_TAIL_LINES = 20
_LOG_TAIL_BYTES = 1 << 16


def read_reports(attempt: Attempt, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    """What failed ranks left word of."""
    paths = {rank: rank_error(attempt.dir, attempt.number, rank) for rank in ranks}
    return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}


@dataclass(frozen=True, kw_only=True)
class RankEnds:
    """How ranks ended."""

    attempt: Attempt
    exit_codes: Mapping[int, int]
    """Of failed ranks, negative for a signal."""

    reports: Mapping[int, Mapping[str, Any]]
    gone: Mapping[int, float]
    """When each was seen to be gone, seconds since 1970."""

    killed_time: float | None
    """When the launcher killed those that were left."""

    signum: int | None
    """Signal that asked the run to stop."""

    node: str
    """For messages; empty where there is only one."""

    def first_failure(self) -> Failure | None:
        """The failure that the others followed from; None if no rank failed."""
        if not self.exit_codes and not self.reports:
            return None
        weight, times = self._candidates()
        first = min(times, key=lambda rank: times[rank])
        when = min(times[first], 1e12)  # JSON knows no infinity
        if first in self.reports:
            return self._reported(first, self.reports[first], when, weight)
        code = self.exit_codes[first]
        if self.signum is not None and -code in STOP_SIGNALS:
            message = f"{self._name(first)} was ended by a signal before it could stop"
            return Failure(kind="killed", message=message, signum=self.signum, time=when, weight=weight)
        return Failure(kind="worker", message=self._died(first, code), time=when, weight=weight)

    def _candidates(self) -> tuple[int, dict[int, float]]:
        """Ranks whose failure may be the first, with its time."""
        last_own = self.killed_time or math.inf
        silent = {
            rank: self.gone[rank]
            for rank, code in self.exit_codes.items()
            if rank not in self.reports and self.gone.get(rank, math.inf) < last_own
        }
        # A positive code without a report is a rank that could not write it, on a full disk for one.
        codes = self.exit_codes
        crashed = {rank: time for rank, time in silent.items() if codes[rank] > 0 or -codes[rank] in _CRASHES}
        # When one process fails, the errors that its peers get may be there before its failure is seen.
        if crashed:
            return CRASHED, crashed
        times = {rank: report["time"] for rank, report in self.reports.items()}
        own = silent | {rank: time for rank, time in times.items() if self.reports[rank]["kind"] not in OF_OTHERS}
        if own:
            return OWN, own
        return FOLLOWED, {rank: self.gone.get(rank, math.inf) for rank in self.exit_codes} | times

    def _reported(self, rank: int, report: Mapping[str, Any], when: float, weight: int) -> Failure:
        match report["kind"]:
            case "config":
                faults = tuple(Fault(**fault) for fault in report["faults"])
                return Failure(kind="config", message="", faults=faults, time=when, weight=weight)
            case "run" | "peer" | "timeout":
                message = report["message"] if not self.node else f"{self._name(rank)}: {report['message']}"
                return Failure(kind="run", message=message, time=when, weight=weight)
            case _:
                message = f"{self._name(rank)} failed; its log: {self._log(rank)}\n{report['text'].rstrip()}"
                return Failure(kind="worker", message=message, time=when, weight=weight)

    def _died(self, rank: int, code: int) -> str:
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            how += " (the kernel sends it when memory runs out)"
        elif code == -signal.SIGBUS:
            how += " (a file that is read through a memory map, such as a data shard, was cut short or its disk failed)"
        elif code > 0:
            how += " and could not write why into its folder of logs; the lines above may tell"
        log = self._log(rank)
        tail = _tail(log) if log.exists() else []
        return "\n".join([f"{self._name(rank)} {how}; the end of its log {log}:", *(f"  {line}" for line in tail)])

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self.node}" if self.node else f"rank {rank}"

    def _log(self, rank: int) -> Path:
        return rank_log(self.attempt.dir, self.attempt.number, rank)


def _tail(path: Path) -> list[str]:
    """The last lines of a file of any size."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
        return file.read(_LOG_TAIL_BYTES).decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
