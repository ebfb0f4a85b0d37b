"""The run directory: its name, who may use it, and how it is laid out for an attempt. See docs/launch.md."""

import os
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from configs.data import DataConfig, NoDataConfig, SFTDataConfig, TokensDataConfig, is_dataset_id
from configs.errors import ConfigError
from configs.launch import RUN_CONFIG
from configs.model import is_hub_id
from configs.sft import SFTConfig
from trainer.attempts import LOCK_NAME, Attempt, Use, lay_out, refuse_living, taken, unusable, write_config
from trainer.files import write_whole

EVAL_WORKER = "eval_worker"
"""Folder in a run directory in which its eval-worker works."""

JOB_FOLDER = "slurm"
"""Folder in a run directory with the sbatch script and what its jobs leave."""

JOB_SCRIPT = Path(JOB_FOLDER) / "sft.sbatch"
JOB_RECORD = Path(JOB_FOLDER) / "submitted.json"
"""The newest job that was queued for the run."""

_DRY_RUN = "dry_run"
"""Folder of what a dry run writes where it must not take the place of what others read."""

_OF_A_JOB = {"clean": False, "dry_run": False}
"""In the config that a job reads, at each start: what is to be deleted was deleted when it was submitted."""

_RUN = Use(what="a run", folder="the run directory", name_key="run.name", place_key="output_dir")

EVAL_WORKER_USE = Use(
    what="an eval-worker", folder="the eval-worker's directory", name_key="run_dir", place_key="run_dir"
)
"""Of the folder EVAL_WORKER in a run directory."""


def fill_run_name(config: SFTConfig) -> SFTConfig:
    """The config with `run.name` set: `<data>--<model>--<8 hex digits>` where it was not."""
    if config.run.name is not None:
        return config
    data = _data_name(config.data)
    arch = config.model.arch or {}
    model = config.model.name or str(arch.get("model_type", "model"))
    # A folder may be given as `.`; an id of the hub is no path.
    model = Path(model).name if is_hub_id(model) else Path(model).resolve().name
    parts = [re.sub(r"[^\w.-]", "-", part).lstrip(".-") for part in (data, model)]
    name = "--".join([*parts, secrets.token_hex(4)])
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def _data_name(data: DataConfig) -> str:
    match data:
        case TokensDataConfig():
            return data.paths[0].resolve().name
        case SFTDataConfig():
            name = data.parts[0].name
            return Path(name).name if is_dataset_id(name) else Path(name).resolve().name
        case NoDataConfig():
            return "val"
        case _:
            return data.type


def run_dir_of(config: SFTConfig) -> Path:
    """`output_dir / run.name`."""
    assert config.run.name is not None, "fill_run_name comes first"
    return config.output_dir / config.run.name


def check_run_dir(config: SFTConfig) -> None:
    """Refuse a run directory that this config must not use. Changes nothing.

    Raises:
        ConfigError: it is in use, holds another run, cannot be written, or may not be cleaned.
    """
    run_dir = run_dir_of(config)
    try:
        for place in (run_dir, *run_dir.parents):
            if place.exists():
                if not place.is_dir():
                    raise ConfigError.one("output_dir", f"{place} is not a folder")
                break
        _refuse_unwritable(run_dir, place)
        refuse_living(run_dir, replace(_RUN, way_out=_other_place(run_dir)) if config.only_scores else _RUN)
        _refuse_contents(config, run_dir)
    except OSError as error:
        raise unusable(run_dir, _RUN, error) from error


def _other_place(run_dir: Path) -> str:
    return f"; its checkpoints can be scored meanwhile: give --resume.dir {run_dir} and another run.name"


def _refuse_unwritable(run_dir: Path, place: Path) -> None:
    """Ask the kernel, which knows rights, read-only mounts and immutable folders; `place` is what exists of run_dir."""
    written = [place]
    if place == run_dir:
        names = (LOCK_NAME, "configs", RUN_CONFIG, "logs", "checkpoints", "metrics.jsonl")
        written += [path for name in names if (path := run_dir / name).exists()]
    for path in written:
        if not os.access(path, os.W_OK | (os.X_OK if path.is_dir() else 0)):
            raise ConfigError.one("output_dir", f"{path} cannot be written: no permission, or a read-only file system")


def open_run_dir(config: SFTConfig, say: Callable[[str], None]) -> Attempt:
    """Lock the run directory, clean it if asked, and lay out a new attempt.

    Args:
        say: told what is worth knowing (what was deleted, that the file system has no locks).

    Raises:
        ConfigError: as check_run_dir.
        RunError: the directory cannot be used for another reason, such as a full disk.
    """
    run_dir = run_dir_of(config)
    with taken(run_dir, _RUN, say) as lock:
        _refuse_contents(config, run_dir)
        _clean_if_asked(config, run_dir, say)
        return lay_out(run_dir, config, lock, is_beside=config.only_scores and is_used(run_dir))


def write_dry_run(config: SFTConfig) -> Path:
    """Write the config of a dry run; gives the file.

    It lies where the run's own would, and does not make the directory a used one. Beside earlier attempts, and where a
    job may wait, it gets a folder of its own, so that `configs/sft.json` keeps saying what was run, or will be.

    Raises:
        RunError: the directory cannot be written.
    """
    return _write_dry_run(run_dir_of(config), config, RUN_CONFIG)


def write_dry_job(config: SFTConfig, script: str) -> tuple[Path, Path]:
    """As `write_dry_run`, of a job: its config and its script, which can be submitted by hand where it has not got a
    folder of its own. Gives both files."""
    run_dir, job_config = run_dir_of(config), config.model_copy(update=_OF_A_JOB)
    return _write_dry_run(run_dir, job_config, RUN_CONFIG), _write_dry_run(run_dir, script, JOB_SCRIPT)


def _write_dry_run(run_dir: Path, content: SFTConfig | str, file: Path) -> Path:
    is_taken = is_used(run_dir) or (run_dir / JOB_RECORD).exists()
    path = run_dir / file.parent / (_DRY_RUN if is_taken else "") / file.name
    try:
        if isinstance(content, str):
            write_whole(path, content.encode())
        else:
            write_config(content, path)
    except OSError as error:
        raise unusable(run_dir, _RUN, error) from error
    return path


def lay_out_job(config: SFTConfig, script: str, say: Callable[[str], None]) -> Path:
    """Make the run directory ready for a job: cleaned if asked, with the config that the job reads, and its script.

    Returns:
        the script's place.

    Raises:
        ConfigError, RunError: as open_run_dir.
    """
    run_dir = run_dir_of(config)
    with taken(run_dir, _RUN, say) as lock, lock:
        _refuse_contents(config, run_dir)
        _clean_if_asked(config, run_dir, say)
        write_config(config.model_copy(update=_OF_A_JOB), run_dir / RUN_CONFIG)
        write_whole(run_dir / JOB_SCRIPT, script.encode())
    return run_dir / JOB_SCRIPT


def _clean_if_asked(config: SFTConfig, run_dir: Path, say: Callable[[str], None]) -> None:
    if config.clean and is_used(run_dir):
        _clean(run_dir)
        say(f"clean: deleted what {run_dir} held")


def _refuse_contents(config: SFTConfig, run_dir: Path) -> None:
    if not is_used(run_dir):
        return
    resume = config.resume
    goes_on = resume is not None and (resume.auto or resume.dir is None or resume.dir.resolve() == run_dir.resolve())
    if config.clean:
        _refuse_cleaning(config.output_dir, run_dir)
        refuse_living(run_dir / EVAL_WORKER, replace(EVAL_WORKER_USE, name_key="clean"))
    elif not goes_on:
        raise ConfigError.one(
            "run.name",
            f"{run_dir} is not empty: go on with its run by [resume] (without dir), delete it by --clean, "
            "or give another name",
        )
    elif resume is not None and resume.auto and not _is_run(run_dir):
        message = f"{run_dir} holds files of no run of ours, and resume.auto may start one there: give another name"
        raise ConfigError.one("run.name", message)


def _refuse_cleaning(output_dir: Path, run_dir: Path) -> None:
    """Only a folder that is ours, and itself below output_dir (not through a link), is ever deleted."""
    if run_dir.resolve() != output_dir.resolve() / run_dir.name:
        raise ConfigError.one("clean", f"{run_dir} is a link to {run_dir.resolve()}: not deleted")
    if not (run_dir / RUN_CONFIG).is_file():
        raise ConfigError.one("clean", f"{run_dir} holds no {RUN_CONFIG}, so it is not a run of ours: not deleted")


def _is_run(run_dir: Path) -> bool:
    """It holds a run's config, or no more than an attempt that was killed before it could write that."""
    first = (LOCK_NAME, RUN_CONFIG.parent.name, JOB_FOLDER, "logs")
    return (run_dir / RUN_CONFIG).is_file() or all(entry.name in first for entry in run_dir.iterdir())


def is_used(run_dir: Path) -> bool:
    """It holds more than a dry run or a submission leaves: a lock file, configs of no attempt, what belongs to jobs."""
    if not run_dir.is_dir():
        return False
    if any(entry.name not in (LOCK_NAME, "configs", JOB_FOLDER) for entry in run_dir.iterdir()):
        return True
    configs = run_dir / "configs"
    return configs.is_dir() and any(entry.name not in (RUN_CONFIG.name, _DRY_RUN) for entry in configs.iterdir())


def _clean(run_dir: Path) -> None:
    # The configs last: they are what shows a later --clean that the rest is a run of ours.
    for entry in sorted(run_dir.iterdir(), key=lambda entry: entry.name == "configs"):
        if entry.name == LOCK_NAME:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
