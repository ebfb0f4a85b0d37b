"""The run directory: its name, who may use it, and how it is laid out for an attempt. See docs/launch.md."""

import errno
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from configs.data import DataConfig, SFTDataConfig, TokensDataConfig, is_dataset_id
from configs.errors import ConfigError
from configs.launch import RUN_CONFIG
from configs.model import is_hub_id
from configs.sft import SFTConfig
from trainer.errors import RunError
from trainer.files import write_whole
from trainer.locks import try_lock
from trainer.run import attempt_config, attempt_logs

_LOCK = ".lock"
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Faults of the place that the config names, not of the moment."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A run directory made ready for its workers. Close it when they are gone."""

    dir: Path
    number: int
    lock: TextIO

    def close(self) -> None:
        """Let others use the directory."""
        self.lock.close()


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
        _refuse_living_run(run_dir)
        _refuse_contents(config, run_dir)
    except OSError as error:
        raise _unusable(run_dir, error) from error


def _refuse_unwritable(run_dir: Path, place: Path) -> None:
    """Ask the kernel, which knows rights, read-only mounts and immutable folders; `place` is what exists of run_dir."""
    written = [place]
    if place == run_dir:
        names = (_LOCK, "configs", RUN_CONFIG, "logs", "checkpoints", "metrics.jsonl")
        written += [path for name in names if (path := run_dir / name).exists()]
    for path in written:
        if not os.access(path, os.W_OK | (os.X_OK if path.is_dir() else 0)):
            raise ConfigError.one("output_dir", f"{path} cannot be written: no permission, or a read-only file system")


def _unusable(run_dir: Path, error: OSError) -> ConfigError | RunError:
    """What to make of the failure of something done to the run directory."""
    message = f"{error.filename or run_dir}: {error.strerror or error}"
    if error.errno in _FORBIDDEN:
        return ConfigError.one("output_dir", message)
    return RunError(f"the run directory {run_dir} cannot be used: {message}")


def open_run_dir(config: SFTConfig, say: Callable[[str], None]) -> Attempt:
    """Lock the run directory, clean it if asked, and lay out a new attempt.

    Args:
        say: told what is worth knowing (what was deleted, that the file system has no locks).

    Raises:
        ConfigError: as check_run_dir.
        RunError: the directory cannot be used for another reason, such as a full disk.
    """
    run_dir = run_dir_of(config)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = _lock(run_dir, say)
        try:
            _refuse_contents(config, run_dir)
            if config.clean and _is_used(run_dir):
                _clean(run_dir)
                say(f"clean: deleted what {run_dir} held")
            number = _next_attempt(run_dir)
            attempt_logs(run_dir, number).mkdir(parents=True)
            _replace_link(run_dir / "logs" / "latest", attempt_logs(run_dir, number).name)
            write_config(config, attempt_config(run_dir, number))
            write_config(config, run_dir / RUN_CONFIG)
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise _unusable(run_dir, error) from error
    return Attempt(dir=run_dir, number=number, lock=lock)


def write_dry_run(config: SFTConfig) -> Path:
    """Write the config of a dry run; gives the file.

    It lies where the run's own would, and does not make the directory a used one. Beside earlier attempts it gets a
    folder of its own, so that `configs/sft.json` keeps saying what was run.

    Raises:
        RunError: the directory cannot be written.
    """
    run_dir = run_dir_of(config)
    folder = run_dir / "configs"
    path = folder / "dry_run" / "sft.json" if _is_used(run_dir) else folder / "sft.json"
    try:
        write_config(config, path)
    except OSError as error:
        raise _unusable(run_dir, error) from error
    return path


def write_config(config: SFTConfig, path: Path) -> None:
    """Write a config as JSON, which keeps nulls and parses to the same object. A reader never sees half of it."""
    write_whole(path, (config.model_dump_json(indent=2) + "\n").encode())


def share_run_dir(run_dir: Path) -> TextIO:
    """A worker's hold on the run directory: it counts as in use until the returned file is closed.

    Raises:
        RunError: another run has taken it, so this worker's launcher must be dead.
    """
    lock = (run_dir / _LOCK).open("r+")
    if try_lock(lock, shared=True) is False:
        lock.close()
        raise RunError(f"{run_dir} was taken by another run")
    return lock


def is_in_use(run_dir: Path) -> bool | None:
    """Whether a process of the run lives; None where nobody can tell: no locks, or no right to read theirs."""
    try:
        # For reading only: somebody else's run may be looked at without the right to write.
        lock = (run_dir / _LOCK).open()
    except OSError as error:
        return False if error.errno == errno.ENOENT else None
    with lock:
        try:
            is_free = try_lock(lock)
        except OSError:
            return None
    return None if is_free is None else not is_free


def _lock(run_dir: Path, say: Callable[[str], None]) -> TextIO:
    """Take the directory for this launcher and, later, its workers.

    The launcher ends up with a shared lock, as each worker does (share_run_dir), and a newcomer asks for an exclusive
    one: so the directory is in use as long as any process of the run lives.
    """
    # Emptied below: a link put there by another user must not lead to a file of ours.
    lock = os.fdopen(os.open(run_dir / _LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666), "a+")
    try:
        is_ours = try_lock(lock)
        if is_ours is False:
            raise _in_use(run_dir)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        if is_ours is None:
            text = "lies on a file system without locks: nothing keeps a second run from using it at the same time"
            say(f"{run_dir} {text}")
        elif try_lock(lock, shared=True) is False:  # the change is not atomic
            raise _in_use(run_dir)
    except BaseException:
        with suppress(OSError):  # the disk may be full, and closing tries to write once more
            lock.close()
        raise
    return lock


def _refuse_living_run(run_dir: Path) -> None:
    path = run_dir / _LOCK
    if not path.exists():
        return
    with path.open("r+") as lock:
        if try_lock(lock) is False:
            raise _in_use(run_dir)


def _in_use(run_dir: Path) -> ConfigError:
    holder = (run_dir / _LOCK).read_text(errors="replace").strip() or "another process"
    message = f"{run_dir} is in use by a run that has not ended ({holder})"
    host = holder.rpartition(" on ")[2] if " on " in holder else socket.gethostname()
    if host != socket.gethostname():
        # The kernel frees the lock of a dead process; a file server may keep that of a dead machine.
        message += f"; if {host} is down for good, delete {run_dir / _LOCK}"
    return ConfigError.one("run.name", message)


def _refuse_contents(config: SFTConfig, run_dir: Path) -> None:
    if not _is_used(run_dir):
        return
    goes_on = config.resume is not None and (
        config.resume.dir is None or config.resume.dir.resolve() == run_dir.resolve()
    )
    if config.clean:
        _refuse_cleaning(config.output_dir, run_dir)
    elif not goes_on:
        raise ConfigError.one(
            "run.name",
            f"{run_dir} is not empty: go on with its run by [resume] (without dir), delete it by --clean, "
            "or give another name",
        )


def _refuse_cleaning(output_dir: Path, run_dir: Path) -> None:
    """Only a folder that is ours, and itself below output_dir (not through a link), is ever deleted."""
    if run_dir.resolve() != output_dir.resolve() / run_dir.name:
        raise ConfigError.one("clean", f"{run_dir} is a link to {run_dir.resolve()}: not deleted")
    if not (run_dir / RUN_CONFIG).is_file():
        raise ConfigError.one("clean", f"{run_dir} holds no {RUN_CONFIG}, so it is not a run of ours: not deleted")


def _is_used(run_dir: Path) -> bool:
    """It holds more than a dry run leaves: a lock file and configs of no attempt."""
    if not run_dir.is_dir():
        return False
    if any(entry.name not in (_LOCK, "configs") for entry in run_dir.iterdir()):
        return True
    configs = run_dir / "configs"
    return configs.is_dir() and any(entry.name != "sft.json" for entry in configs.iterdir())


def _clean(run_dir: Path) -> None:
    # The configs last: they are what shows a later --clean that the rest is a run of ours.
    for entry in sorted(run_dir.iterdir(), key=lambda entry: entry.name == "configs"):
        if entry.name == _LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _next_attempt(run_dir: Path) -> int:
    names = [entry.name for folder in ("configs", "logs") for entry in (run_dir / folder).glob("attempt_*")]
    return max((int(match[1]) + 1 for name in names if (match := re.fullmatch(r"attempt_(\d+)", name))), default=0)


def _replace_link(link: Path, target: str) -> None:
    new = link.with_name(f"{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)
