"""Whether a snapshot that could not be loaded is to blame."""

from pathlib import Path

from trainer.checkpoint.folder import damage
from trainer.checkpoint.manifest import file_records, read_manifest, wrong_content
from trainer.checkpoint.safe_reader import DamagedError


def find_damage(path: Path) -> str | None:
    """What is wrong with the files of a snapshot; None if they are what was written. Reads all of them."""
    try:
        return damage(path) or wrong_content(path, file_records(read_manifest(path)))
    except DamagedError as error:
        return str(error)
