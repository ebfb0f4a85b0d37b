"""What every command does around its work: check the packages, resolve the config, name faults, give the exit code."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from configs.base import BaseConfig
    from configs.launch import WorkersConfig
    from configs.monitor import WebhookConfig
    from trainer.attempts import Attempt
    from trainer.peers.nodes import Peers

C = TypeVar("C", bound="BaseConfig")

_PACKAGES = ("configs", "models", "trainer")


def run_command(
    prog: str,
    config_class: Callable[[], type[C]],
    start: Callable[[C], int],
    argv: Sequence[str],
    tell: Callable[[str], None] | None = None,
) -> int:
    """Resolve the command line and do the command's work.

    Args:
        prog: name of the command, for `--help`.
        config_class: imports and gives its config class; not before the packages are known to be ours.
        start: the work, given the config; returns the exit code. It imports what takes long itself, so that `--help`
            and every fault of the config answer at once.
        argv: the command line without the command.
        tell: told what is worth knowing about the config; unset: `say`.

    Returns:
        exit code: that of `start`; 1 for a RunError or an output that cannot be written, 2 for a ConfigError, 130 after
        Ctrl-C, 141 when the reader of the output went away (`| head`).
    """
    intruder = find_intruder(Path(__file__).resolve().parents[1])
    if intruder is not None:
        print(intruder, file=sys.stderr)  # `fail` imports from a package that may be the intruder's
        return 2
    # They are None where the caller closed them (`>&-`).
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    try:
        return _run(prog, config_class, start, argv, tell or say)
    except KeyboardInterrupt:
        return fail("interrupted", 130)


def _run(
    prog: str,
    config_class: Callable[[], type[C]],
    start: Callable[[C], int],
    argv: Sequence[str],
    tell: Callable[[str], None],
) -> int:
    from configs.cli import render_error, resolve
    from configs.errors import ConfigError
    from trainer.errors import RunError

    origins: dict[str, str] = {}
    try:
        resolved = resolve(argv, config_class(), prog)
        origins = resolved.origins
        for note in resolved.notes:
            tell(note)
        code = start(resolved.config)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return fail(render_error(error, origins), 2)
    except RunError as error:
        return fail(str(error), 1)
    except OSError as error:
        if not _stdout_fails():
            raise
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        return fail(f"the standard output cannot be written: {error.strerror}", 1)


def launch_attempt(
    attempt: "Attempt",
    deployment: "WorkersConfig",
    num_workers: int,
    worker_command: Sequence[str],
    peers: "Peers | None" = None,
    webhook: "WebhookConfig | None" = None,
) -> int:
    """Run the workers of an attempt to their end, and close it.

    Args:
        num_workers, worker_command, peers: see `trainer.launch.launch`.
        webhook: told what becomes of the attempt.

    Returns:
        exit code: 0 done or stopped as asked, 1 a worker failed, 128 + n killed after signal n.

    Raises:
        ConfigError, RunError: what the first failing worker raised.
    """
    from trainer.launch import KilledError, WorkerError, launch
    from trainer.webhook import told

    try:
        with told(webhook, attempt.dir, attempt.number, say):
            launch(
                attempt,
                num_workers=num_workers,
                stop_timeout=deployment.stop_timeout_seconds,
                say=say,
                command=worker_command,
                timeout=deployment.timeout_seconds,
                peers=peers,
            )
    except WorkerError as error:
        return fail(str(error), 1)
    except KilledError as error:
        return fail(str(error), 128 + error.signum)
    finally:
        attempt.close()
    return 0


def _stdout_fails() -> bool:
    """Whether nothing more can be written to stdout, tried with a line end: what failed may be gone from its buffer."""
    try:
        print(flush=True)
    except OSError:
        # Python flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def find_intruder(home: Path) -> str | None:
    """What is wrong if one of our packages is found elsewhere than below `home`: their names are common words."""
    for name in _PACKAGES:
        spec = find_spec(name)
        places = list(spec.submodule_search_locations or [spec.origin]) if spec is not None else []
        if [Path(place).resolve() for place in places if place] != [home / name]:
            found = ", ".join(map(str, places)) or "nowhere"
            return (
                f"the package {name!r} is found at {found}, not at {home / name}: another one of that name comes "
                "first on the import path (PYTHONPATH, or an installed package); take it away and start again"
            )
    return None


def say(text: str) -> None:
    """A line on stdout, at once: workers write to the same console. Secrets and control characters do not get there."""
    from configs.safe_text import safe

    print(safe(text), flush=True)


def warn(text: str) -> None:
    """The same on stderr, for commands whose stdout is their result."""
    from configs.safe_text import safe

    print(safe(text), file=sys.stderr, flush=True)


def fail(text: str, code: int) -> int:
    """`warn`, and the exit code given back."""
    warn(text)
    return code
