"""The output folder: what may be written there, the unfinished work in it, and its finish.

Everything is made in `.partial` and moved into place at the end, so `train` and `heldout` are whole from the moment
they are there. `tokenize.json` says what was made; it is the last to come and the last to go.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from trainer.data.shards import UNFINISHED
from trainer.errors import RunError
from trainer.files import write_whole
from trainer.locks import is_at, try_lock

FOLDERS = ("tokenizer", "heldout", "train")
"""In the order in which they come into place."""

RECORD = "tokenize.json"
_PLAN = "plan.json"
_LOCK = "lock"
_KEY = "output_dir"
_WORK_FILES = (_PLAN, "job.json", "encoder.json", RECORD)
_WORK_FOLDERS = (*FOLDERS, "tokenizer.tmp", "done")
_LOCK_SECONDS = 5.0
"""How long the lock may last after a killed command: its workers notice and end at once."""


class Output:
    """The output folder of one command, locked from `open_output` until `close`."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self.partial = folder / UNFINISHED
        self.lock = lock
        """File descriptor."""

    @property
    def is_complete(self) -> bool:
        """All the work is done and only has to be moved into place."""
        return (self.partial / RECORD).exists()

    @property
    def has_results(self) -> bool:
        """There is more than tasks that did not end: a trained tokenizer, a finished task, or all in place already."""
        return self.is_complete or (self.partial / "tokenizer").exists() or any((self.partial / "done").glob("*.json"))

    def finish(self, record: dict[str, Any]) -> None:
        """Move the finished work into place; `record` becomes tokenize.json. Goes on where an earlier call was killed.

        Raises:
            RunError: something cannot be moved.
        """
        try:
            if not self.is_complete:
                write_whole(self.partial / RECORD, (json.dumps(record, indent=1) + "\n").encode())
            for name in (*FOLDERS, RECORD):
                if (self.partial / name).exists():
                    (self.partial / name).rename(self.folder / name)
        except OSError as error:
            raise RunError(f"{self.folder} cannot be finished: {error}") from error
        self.remove_work()
        self.remove_lock()

    def remove_lock(self) -> None:
        """Leave no `.partial` behind, unless there is more in it than the lock."""
        with suppress(OSError):
            (self.partial / _LOCK).unlink()
            self.partial.rmdir()

    def close(self) -> None:
        os.close(self.lock)

    def remove_work(self) -> None:
        """Delete what this module and the tasks write in `.partial`, but for the lock."""
        for name in _WORK_FOLDERS:
            shutil.rmtree(self.partial / name, ignore_errors=True)
        for name in (*_WORK_FILES, *(f"{name}.new" for name in _WORK_FILES)):
            (self.partial / name).unlink(missing_ok=True)


def open_output(folder: Path, plan: dict[str, Any], *, clean: bool, say: Callable[[str], None]) -> tuple[Output, bool]:
    """Lock the output folder and make it ready for this plan: a new one, or to go on with unfinished work.

    Args:
        plan: all that decides what is written, as flat JSON values by key.
        clean: delete what an earlier command made first.
        say: told that the file system has no locks.

    Returns:
        the output, and whether there is unfinished work to go on with.

    Raises:
        ConfigError: it is finished, belongs to a running command or to other settings, or cannot be written.
    """
    if not clean:
        _refuse_finished(folder)
    try:
        output = _lock(folder, say)
        try:
            if clean:
                _clean(output)
            elif (folder / RECORD).exists():
                # The command that had the lock has finished meanwhile.
                output.remove_lock()
                _refuse_finished(folder)
            return output, _begin(output, plan)
        except BaseException:
            output.close()
            raise
    except OSError as error:
        raise ConfigError.one(_KEY, f"{error.filename or folder} cannot be written ({error.strerror})") from error


def _lock(folder: Path, say: Callable[[str], None]) -> Output:
    path = folder / UNFINISHED / _LOCK
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_CREAT | os.O_RDWR)
        is_ours = try_lock(handle)
        if is_ours is None:
            say(f"{folder} lies on a file system without locks: nothing keeps a second tokenize from writing there too")
        if is_ours is None or (is_ours and is_at(handle, path)):
            return Output(folder, handle)
        os.close(handle)
        if time.monotonic() > end:
            message = f"another tokenize is at work in {folder}; wait for it or choose another one"
            raise ConfigError.one(_KEY, message)
        time.sleep(0.1)


def _refuse_finished(folder: Path) -> None:
    if (folder / RECORD).exists():
        message = f"{folder} holds the finished work of an earlier tokenize; --clean deletes it, or choose another one"
        raise ConfigError.one(_KEY, message)


def _begin(output: Output, plan: dict[str, Any]) -> bool:
    plan_file = output.partial / _PLAN
    if not plan_file.exists():
        taken = [str(output.folder / name) for name in FOLDERS if (output.folder / name).exists()]
        if taken:
            output.remove_lock()
            message = f"{', '.join(taken)} exists already and is not of an earlier tokenize; choose another output_dir"
            raise ConfigError.one(_KEY, message)
        write_whole(plan_file, json.dumps(plan, indent=1).encode())
        return False
    try:
        earlier: dict[str, Any] = json.loads(plan_file.read_bytes())
    except ValueError as error:
        raise ConfigError.one(_KEY, f"{plan_file} is damaged; --clean starts anew") from error
    changed = [
        f"{key} was {earlier.get(key)!r} and is {plan.get(key)!r}"
        for key in dict.fromkeys([*earlier, *plan])
        if earlier.get(key) != plan.get(key)
    ]
    if changed and not output.has_results:
        # Nothing would be lost: whoever got the first command line wrong should not have to ask for a deletion.
        output.remove_work()
        write_whole(plan_file, json.dumps(plan, indent=1).encode())
        return False
    if changed:
        message = (
            f"{output.folder} holds unfinished work with other settings: {'; '.join(changed[:8])}. Give the same "
            "again to go on with it, or --clean to start anew"
        )
        raise ConfigError.one(_KEY, message)
    return True


def _clean(output: Output) -> None:
    """Delete what an earlier tokenize made, and nothing else.

    Raises:
        ConfigError: its folders hold other files too.
    """
    # In `.partial` while the command that was killed moved its work into place.
    for record in (output.folder / RECORD, output.partial / RECORD):
        if record.exists():
            _delete_made(output.folder, record)
    output.remove_work()


def _delete_made(folder: Path, record: Path) -> None:
    """Delete the files that a record names, their folders, and the record."""
    try:
        made = {Path(name) for name in json.loads(record.read_bytes())["files"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError.one(_KEY, f"{record} is damaged; delete the folders in {folder} yourself") from error
    there = {path.relative_to(folder) for name in FOLDERS for path in (folder / name).glob("*")}
    if there - made:
        message = f"{folder / min(there - made)} was not made by tokenize; move it away first"
        raise ConfigError.one(_KEY, message)
    for path in there:
        (folder / path).unlink()
    for name in FOLDERS:
        with suppress(FileNotFoundError):
            (folder / name).rmdir()
    record.unlink()
