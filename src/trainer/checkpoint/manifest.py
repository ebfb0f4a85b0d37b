"""`state.json` of a checkpoint: everything that is no tensor, and what tells whether the files beside it are whole."""

import json
import re
import stat
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from trainer.checkpoint.checksum import checksum
from trainer.checkpoint.safe_reader import FILE_NAME, METADATA_NAME, DamagedError, read_metadata
from trainer.errors import RunError
from trainer.files import write_whole

STATE_NAME = "state.json"
FORMAT_VERSION = 2
STEP_NAME = re.compile(r"step_(0|[1-9][0-9]*)")
"""Name of a checkpoint's folder."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What `state.json` says about a file beside it."""

    size: int
    """Bytes."""

    checksum: str
    """See trainer.checkpoint.checksum."""

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        """Read from the file itself."""
        return cls(size=path.stat().st_size, checksum=checksum(path))


def read_state(path: Path) -> dict[str, Any]:
    """What `Checkpointer.save` was given as state.

    Raises:
        RunError: the checkpoint is damaged.
    """
    try:
        return read_manifest(path)["state"]
    except DamagedError as error:
        raise RunError(f"checkpoint {path} cannot be loaded: {error}") from error


def read_manifest(path: Path) -> dict[str, Any]:
    """The content of `state.json`, after a look at the size of every file it lists and at the content of the small one.

    Raises:
        DamagedError: it cannot be read, was changed, names a file that no checkpoint has, or such a file is missing, of
            another size or a link.
    """
    try:
        _require_regular(path, STATE_NAME)
        manifest = json.loads((path / STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{STATE_NAME} cannot be read ({error})") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("state"), dict):
        raise DamagedError(f"{STATE_NAME} is not of the known format")
    if manifest.get("format") != FORMAT_VERSION:
        raise DamagedError(f"{STATE_NAME} has format {manifest.get('format')!r}; this version reads {FORMAT_VERSION}")
    if manifest.pop("checksum", None) != _checksum(manifest):
        raise DamagedError(f"{STATE_NAME} was changed since it was written")
    match = STEP_NAME.fullmatch(path.name)
    if match and int(match[1]) != manifest.get("step"):
        raise DamagedError(f"{STATE_NAME} is of step {manifest.get('step')!r}")
    files = file_records(manifest)
    for name, record in files.items():
        found = _require_regular(path, name)
        if found != record.size:
            raise DamagedError(f"{name} has {found} bytes instead of {record.size}")
    # A flipped bit in a pickle can ask for gigabytes of memory before it turns out to be nonsense.
    reason = wrong_content(path, {METADATA_NAME: files[METADATA_NAME]})
    if reason is not None:
        raise DamagedError(reason)
    return manifest


def read_checkpoint(path: Path) -> tuple[dict[str, Any], Metadata]:
    """What `state.json` holds, and where each tensor lies.

    Raises:
        DamagedError: as `read_manifest` and `read_metadata`; or tensors lie in a file that `state.json` does not list.
    """
    manifest, metadata = read_manifest(path), read_metadata(path)
    unlisted = {info.relative_path for info in metadata.storage_data.values()} - set(manifest["files"])
    if unlisted:
        raise DamagedError(f"{STATE_NAME} does not list {min(unlisted)}, which holds tensors")
    return manifest, metadata


def write_manifest(path: Path, *, step: int, state: dict[str, Any], files: Mapping[str, FileRecord]) -> None:
    """Write the `state.json` of the folder at `path` to disk; arguments as in `commit`."""
    records = {name: asdict(files[name]) for name in sorted(files)}
    manifest = {"format": FORMAT_VERSION, "step": step, "files": records, "state": state}
    # What json makes of it (names of dicts become text) is what a reader sees.
    values = json.loads(json.dumps(manifest))
    text = json.dumps(values | {"checksum": _checksum(values)}, indent=1)
    write_whole(path / STATE_NAME, (text + "\n").encode())


def file_records(manifest: Mapping[str, Any]) -> dict[str, FileRecord]:
    """The files that a manifest lists.

    Raises:
        DamagedError: it lists none, or names one that could lie elsewhere.
    """
    files = manifest.get("files")
    if not isinstance(files, dict) or METADATA_NAME not in files:
        raise DamagedError(f"{STATE_NAME} does not list the files")
    for name in files:
        if name != METADATA_NAME and not FILE_NAME.fullmatch(name):
            raise DamagedError(f"refused: {STATE_NAME} lists {name!r}, which is no file of a checkpoint")
    try:
        return {name: FileRecord(**record) for name, record in files.items()}
    except TypeError as error:
        raise DamagedError(f"{STATE_NAME} does not give size and checksum of the files") from error


def wrong_content(path: Path, files: Mapping[str, FileRecord]) -> str | None:
    """Which of `files` in the checkpoint at `path` does not hold what was written, or None. Reads them whole."""
    for name, record in files.items():
        try:
            found = checksum(path / name)
        except OSError as error:
            return f"{name} cannot be read ({error})"
        if found != record.checksum:
            return f"{name} holds other bytes than were written (checksum {found} instead of {record.checksum})"
    return None


def _require_regular(path: Path, name: str) -> int:
    """The size of a file, which must be no link (it may lead out of the folder) and no pipe (reading one hangs)."""
    try:
        found = (path / name).lstat()
    except OSError as error:
        raise DamagedError(f"{name} is missing") from error
    if not stat.S_ISREG(found.st_mode):
        raise DamagedError(f"refused: {name} is not a plain file")
    return found.st_size


def _checksum(manifest: dict[str, Any]) -> str:
    """Of the values, so that the layout of the file does not matter."""
    try:
        return f"{zlib.crc32(json.dumps(manifest, sort_keys=True).encode()):08x}"
    except RecursionError as error:
        raise DamagedError(f"{STATE_NAME} is nested too deeply") from error
