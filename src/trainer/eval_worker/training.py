"""The training run whose snapshots are scored, as its folder shows it."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import ValidationError

from configs.checkpoint import ResumeConfig
from configs.checks import check_suite
from configs.errors import ConfigError
from configs.eval_worker import EvalWorkerConfig
from configs.launch import RUN_CONFIG
from configs.sft import SFTConfig
from configs.validation import SuiteConfig, ValConfig
from trainer.errors import RunError
from trainer.run import attempt_config


def await_training(config: EvalWorkerConfig, say: Callable[[str], None]) -> SFTConfig:
    """The config of the training run, once it was started: nothing is written to its folder before.

    Raises:
        ConfigError: what lies there is no run, one of another version, or one that writes no snapshots.
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
    """The config that the run is trained with; None before its first attempt, also after a dry run.

    Raises:
        ConfigError: it cannot be read, is of another version, or writes no snapshots.
    """
    path = run_dir / RUN_CONFIG
    try:
        if not attempt_config(run_dir, 0).is_file() or not path.is_file():
            return None
        training = SFTConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError.one("run_dir", f"{error.filename or path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        message = f"{path} is no config of this version of the program ({what})"
        raise ConfigError.one("run_dir", message) from error
    if training.eval_snapshots is None:
        message = (
            f"the run in {run_dir} has no [eval_snapshots], so there will be nothing to score; resume it with that "
            "table, or score a checkpoint of it by sft --max-steps 0 --resume"
        )
        raise ConfigError.one("run_dir", message)
    return training


def scored_config(config: EvalWorkerConfig, training: SFTConfig) -> SFTConfig:
    """What the model and the suite are built from: the training's config, to be scored on the worker's `[val]`, or else
    its own, by the worker's ranks.

    Raises:
        ConfigError: neither has one, or what the training's names is not there.
    """
    if config.val is not None:
        val = ValConfig(**{name: getattr(config.val, name) for name in SuiteConfig.model_fields})
    elif training.val is not None:
        val = training.val
        if faults := check_suite(val):
            raise ConfigError(faults)
    else:
        message = "is missing: neither this command nor the run's own config says what to score; give [val] with sets"
        raise ConfigError.one("val", message)
    # The training's layout over ranks is no part of its weights; the worker's ranks are fewer.
    layout = {"dp_replicate": 1, "cp": 1, "defer_replicate_sync": False}
    on_host = training.model.fsdp_cpu_offload and torch.cuda.is_available()  # without a GPU they are there anyway
    model = training.model.model_copy(update=layout | {"fsdp_cpu_offload": on_host})
    changes = {"max_steps": 0, "resume": ResumeConfig(dir=config.run_dir), "val": val, "model": model}
    return training.model_copy(update=changes | {"log": config.log, "deployment": config.deployment})
