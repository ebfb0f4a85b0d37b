"""`sft`: trains. Resolves and checks the config, lays out the run directory, starts the workers and waits for them."""

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.sft import SFTConfig

_PACKAGES = ("configs", "models", "trainer")


def main() -> None:
    """Entry point of the command."""
    sys.exit(run_sft(sys.argv[1:]))


def run_sft(argv: list[str]) -> int:
    """Train as the command line says.

    Returns:
        exit code: 0 done or stopped as asked, 1 failed, 2 the config cannot run, 128 + n killed after signal n.
    """
    intruder = find_intruder(Path(__file__).resolve().parents[1])
    if intruder is not None:
        print(intruder, file=sys.stderr)
        return 2
    from configs.cli import render_error, resolve
    from configs.errors import ConfigError
    from trainer.errors import RunError

    origins: dict[str, str] = {}
    try:
        resolved = resolve(argv)
        origins = resolved.origins
        for note in resolved.notes:
            _say(note)
        return _start(resolved.config)
    except ConfigError as error:
        return _fail(render_error(error, origins), 2)
    except RunError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted before anything was started", 130)


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


def _start(config: "SFTConfig") -> int:
    from trainer.launch import WORKER_COMMAND, KilledError, WorkerError, count_workers, launch
    from trainer.run_dir import check_run_dir, fill_run_name, open_run_dir, run_dir_of, write_dry_run

    config = fill_run_name(config)
    run_dir = run_dir_of(config)
    check_run_dir(config)
    num_workers = count_workers(config.deployment)
    # Imports models and transformers, which take seconds.
    from trainer.preflight import preflight

    plan = preflight(config, run_dir=run_dir, world_size=num_workers, say=_say)
    for line in plan.lines():
        _say(line)
    if config.dry_run:
        _say(f"dry run: config written to {write_dry_run(config)}; nothing was started")
        _say(f"would start {num_workers} x: {shlex.join([*WORKER_COMMAND, str(run_dir)])}")
        return 0
    attempt = open_run_dir(config, _say)
    _say(f"run: {run_dir}, attempt {attempt.number}")
    try:
        launch(attempt, num_workers=num_workers, stop_timeout=config.deployment.stop_timeout_seconds, say=_say)
    except WorkerError as error:
        return _fail(str(error), 1)
    except KilledError as error:
        return _fail(str(error), 128 + error.signum)
    finally:
        attempt.close()
    return 0


def _say(text: str) -> None:
    # At once: the workers write to the same console.
    print(text, flush=True)


def _fail(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    return code
