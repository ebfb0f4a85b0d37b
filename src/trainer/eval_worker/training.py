"""The training run whose snapshots are scored, as its folder shows it."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from configs.checks import check_suite
from configs.errors import ConfigError
from configs.eval_worker import EvalWorkerConfig
from configs.launch import RUN_CONFIG
from configs.sft import SFTConfig
from configs.validation import SuiteConfig
from trainer.errors import RunError
from trainer.run import attempt_config
from trainer.snapshots import queue

_ATTEMPT_NAME = re.compile(r"attempt_(0|[1-9][0-9]*)")


def await_training(config: EvalWorkerConfig, say: Callable[[str], None]) -> SFTConfig:
    """The config of the training run's newest start, once there was one: nothing is written to its folder before.

    Raises:
        ConfigError: what lies there is no run, or one of another version.
        RunError: none was started within max_idle_minutes.
    """
    begin = time.monotonic()
    is_said = False
    while True:
        training = find_training(config.run_dir)
        if training is not None:
            return training
        if not is_said:
            say(f"waiting for a training run to start in {config.run_dir}: there is none yet (Ctrl-C ends)")
            is_said = True
        if config.max_idle_minutes is not None and time.monotonic() - begin > 60 * config.max_idle_minutes:
            raise RunError(
                f"no training run was started in {config.run_dir} within max_idle_minutes = {config.max_idle_minutes:g}"
            )
        time.sleep(config.poll_seconds)


def find_training(run_dir: Path) -> SFTConfig | None:
    """The config of the newest attempt that trains; None before the first. One that only scores (`max_steps = 0`) says
    nothing about the training.

    Raises:
        ConfigError: the folder cannot be read, or the config is of another version.
    """
    folder = run_dir / RUN_CONFIG.parent
    try:
        matches = [_ATTEMPT_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
        for number in sorted((int(match[1]) for match in matches if match), reverse=True):
            path = attempt_config(run_dir, number, RUN_CONFIG.name)
            if path.is_file() and json.loads(content := path.read_bytes()).get("max_steps") != 0:
                return SFTConfig.model_validate_json(content)
    except OSError as error:
        message = f"{error.filename or folder} cannot be read: {error.strerror}"
        raise ConfigError.one("run_dir", message) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        message = f"{path} is no config of this version of the program ({what})"
        raise ConfigError.one("run_dir", message) from error
    except (ValueError, RecursionError, AttributeError) as error:
        raise ConfigError.one("run_dir", f"{path} is damaged: {error}") from error
    return None


def check_snapshots(run_dir: Path, training: SFTConfig) -> None:
    """
    Raises:
        ConfigError: the run writes no snapshots, and none waits.
    """
    if training.eval_snapshots is not None or queue.waiting(run_dir) or queue.claimed(run_dir):
        return
    message = (
        f"the run in {run_dir} has no [eval_snapshots], so there will be nothing to score; resume it with that table, "
        "or score a checkpoint of it by sft --max-steps 0 --resume"
    )
    raise ConfigError.one("run_dir", message)


def choose_suite(config: EvalWorkerConfig, training: SFTConfig) -> EvalWorkerConfig:
    """The config with `val` set: the run's own where none was given.

    Raises:
        ConfigError: neither has one, or what it names is not there.
    """
    if config.val is not None:
        return config
    if training.val is None:
        message = "is missing: neither this command nor the run's own config says what to score; give [val] with sets"
        raise ConfigError.one("val", message)
    suite = SuiteConfig(**{name: getattr(training.val, name) for name in SuiteConfig.model_fields})
    faults = check_suite(suite)
    if faults:
        raise ConfigError(faults)
    return config.model_copy(update={"val": suite})
