"""A worker process: one rank of a run, started by `trainer.launch`."""

import ctypes
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from configs.errors import ConfigError
from configs.safe_text import safe, star_secrets
from configs.sft import SFTConfig
from trainer.errors import RunError
from trainer.logs import open_rank_log, setup_logging
from trainer.run import Run, StopSignal, attempt_config, rank_error, rank_log
from trainer.run_dir import share_run_dir

_PR_SET_PDEATHSIG = 1


def run_worker(train: Callable[[SFTConfig, Run], None], argv: list[str]) -> None:
    """Call `train` as the rank that the environment names; returns when it is done.

    A failure is written into the rank's log and error file, and the process ends at once with exit code 2 for a
    ConfigError and 1 for everything else: threads or process groups that hang must not keep a failed rank alive.

    Args:
        train: the work.
        argv: what the launcher appends to its command: run directory, attempt, its process id.
    """
    run_dir, attempt, launcher_pid = Path(argv[0]), int(argv[1]), int(argv[2])
    rank = int(os.environ["RANK"])
    stop = StopSignal()
    stop.install()
    _die_with(launcher_pid)
    stream = open_rank_log(rank_log(run_dir, attempt, rank), rank=rank)
    try:
        # Held until this process is gone, whatever becomes of the launcher.
        _lock = share_run_dir(run_dir)
        config = SFTConfig.model_validate_json(attempt_config(run_dir, attempt).read_text())
        setup_logging(stream, rank=rank, level=config.log.level)
        train(config, Run(dir=run_dir, attempt=attempt, stop=stop))
    except BaseException as error:
        _record(error, stream, rank_error(run_dir, attempt, rank))
        os._exit(2 if isinstance(error, ConfigError) else 1)
    logging.shutdown()


def _die_with(launcher_pid: int) -> None:
    """Have the kernel end this process when the launcher dies, even of kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:  # it died before that
        os._exit(1)


def _record(error: BaseException, stream: TextIO, path: Path) -> None:
    """Leave word for the launcher, which shows it. Not on this process's console: it would be there twice."""
    report: dict[str, Any] = {"time": time.time(), "kind": "crash"}
    report["text"] = safe("".join(traceback.format_exception(error)))
    if isinstance(error, ConfigError):
        report["kind"] = "config"
        report["faults"] = [{"key": fault.key, "message": star_secrets(fault.message)} for fault in error.faults]
    elif isinstance(error, RunError):
        report["kind"], report["message"] = "run", star_secrets(str(error))
    new = path.with_suffix(".new")
    try:
        new.write_text(json.dumps(report))
        new.rename(path)
        stream.write(report["text"])
    except OSError:  # a full disk, say, which may be the very failure: then the console is all there is
        print(report.get("message", report["text"]), file=sys.stderr)
    for flush in (stream.flush, sys.stdout.flush, sys.stderr.flush, logging.shutdown):
        try:
            flush()
        except (OSError, ValueError):  # a console that is gone
            continue


def _train(config: SFTConfig, run: Run) -> None:
    # Imports torch, which takes seconds: signals are handled and the log is open by then.
    from trainer.train import train

    train(config, run)


if __name__ == "__main__":
    run_worker(_train, sys.argv[1:])
