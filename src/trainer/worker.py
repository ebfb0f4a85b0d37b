"""A worker process: one rank of a run, started by `trainer.launch`."""

import ctypes
import errno
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from configs.errors import ConfigError
from configs.safe_text import safe, star_secrets
from configs.sft import SFTConfig
from trainer.attempts import share
from trainer.errors import PeerError, RunError
from trainer.faults import is_timeout, out_of_memory
from trainer.flight_recorder import answer_dump_signals, dump_collectives
from trainer.heartbeat import Heartbeat
from trainer.logs import RankLog, open_rank_log, setup_logging
from trainer.run import (
    Run,
    StopSignal,
    attempt_config,
    ignore_stop_signals,
    rank_collectives,
    rank_error,
    rank_heartbeat,
    rank_log,
)
from trainer.text import first_line

_PR_SET_PDEATHSIG = 1
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""No bug, whatever code ran into it: the message is enough."""

_REPORT_BYTES = 1 << 15


def run_worker(work: Callable[[SFTConfig, Run], None], argv: list[str]) -> NoReturn:
    """Call `work` as the rank that the environment names, and end the process.

    Exit code 0 when it is done. A failure is written into the rank's log and error file, with exit code 2 for a
    ConfigError and 1 for everything else. Either way the process ends at once: threads or process groups that hang must
    not keep a failed rank alive, and threads of torch's that still run when the interpreter takes itself down have
    turned finished ranks into aborted ones.

    Args:
        argv: what the launcher appends to its command: run directory, attempt, its process id.
    """
    run_dir, attempt, launcher_pid = Path(argv[0]), int(argv[1]), int(argv[2])
    rank = int(os.environ["RANK"])
    stop = StopSignal()
    stop.install()
    _die_with(launcher_pid)
    log, report, heartbeat = None, rank_error(run_dir, attempt, rank), None
    collectives = rank_collectives(run_dir, attempt, rank)
    try:
        log = open_rank_log(rank_log(run_dir, attempt, rank), rank=rank)
        answer_dump_signals(log.stream, collectives)
        heartbeat = Heartbeat(rank_heartbeat(run_dir, attempt, rank))
        _reserve(report)
        # Held until this process is gone, whatever becomes of the launcher.
        _lock = share(run_dir)
        config = SFTConfig.model_validate_json(attempt_config(run_dir, attempt).read_text())
        setup_logging(log, level=config.log.level)
        work(config, Run(dir=run_dir, attempt=attempt, stop=stop, heartbeat=heartbeat))
    except BaseException as error:
        if is_timeout(error):
            dump_collectives(collectives)
        _record(error, log, report, heartbeat)
        os._exit(2 if isinstance(error, ConfigError) else 1)
    ignore_stop_signals()
    _new(report).unlink(missing_ok=True)
    _flush()
    os._exit(0)


def _die_with(launcher_pid: int) -> None:
    """Have the kernel end this process when the launcher dies, even of kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:  # it died before that
        os._exit(1)


def _record(error: BaseException, log: RankLog | None, path: Path, heartbeat: Heartbeat | None = None) -> None:
    """Leave word for the launcher, which shows it. Not on this process's console: it would be there twice.

    Args:
        log: the rank's log; None if it could not be opened.
        path: of the report.
        heartbeat: what the rank was doing; None if it had not begun.
    """
    rank = os.environ.get("RANK", "?")
    report: dict[str, Any] = {"time": time.time(), "kind": "crash"}
    report["text"] = safe("".join(traceback.format_exception(error)))
    if isinstance(error, ConfigError):
        report["kind"] = "config"
        report["faults"] = [{"key": fault.key, "message": star_secrets(fault.message)} for fault in error.faults]
    elif is_timeout(error):
        doing = "" if heartbeat is None else f" ({heartbeat.last})"
        report["kind"] = "timeout"
        report["message"] = f"rank {rank} waited for other ranks in vain{doing}: {star_secrets(first_line(error))}"
    elif (message := out_of_memory(error, rank=rank, doing=heartbeat and heartbeat.last)) is not None:
        report["kind"], report["message"] = "run", message
    elif isinstance(error, RunError):
        report["kind"] = "peer" if isinstance(error, PeerError) else "run"
        report["message"] = star_secrets(str(error))
    elif log is None or (isinstance(error, OSError) and error.errno in _FULL):
        report["kind"], report["message"] = "run", f"{path.parent}: {error}" if log is None else str(error)
    console = sys.stderr if log is None else log.console
    try:
        _write_report(report, path)
    except OSError:  # then the console is all there is
        with suppress(OSError):
            print(f"rank {rank}: {report.get('message', report['text'])}", file=console, flush=True)
    if log is not None:
        with suppress(OSError):
            log.stream.write(report["text"])
            log.stream.flush()
    _flush()


def _flush() -> None:
    for flush in (sys.stdout.flush, sys.stderr.flush, logging.shutdown):
        with suppress(OSError, ValueError):  # a console that is gone
            flush()


def _new(path: Path) -> Path:
    return path.with_suffix(".new")


def _reserve(path: Path) -> None:
    """Take the room on the disk that a report needs: the failure may be that there is none left."""
    with suppress(OSError):
        _new(path).write_bytes(b" " * _REPORT_BYTES)


def _write_report(report: dict[str, Any], path: Path) -> None:
    content = json.dumps(report).encode()
    while len(content) > _REPORT_BYTES:  # the log has all of it
        report = report | {"text": report["text"][-len(report["text"]) // 2 :]}
        content = json.dumps(report).encode()
    with _new(path).open("r+b" if _new(path).exists() else "wb") as file:
        file.write(content)  # JSON goes on to be JSON before the spaces that were there
    _new(path).rename(path)


def _run(config: SFTConfig, run: Run) -> None:
    # Both import torch, which takes seconds: signals are handled and the log is open by then.
    if config.only_scores:
        from trainer.evaluate import evaluate

        evaluate(config, run)
        return
    from trainer.train import train

    train(config, run)


if __name__ == "__main__":
    run_worker(_run, sys.argv[1:])
