"""Where conversations lie: local files and folders, folders saved by `datasets`, datasets of the hub.

Each part of `[data]` opens as one `Part`. A name that is a file or folder here is read here; any other is the hub's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from configs.data import ChatConfig, ChatPart, SFTDataConfig, is_dataset_id
from configs.errors import ConfigError, Fault
from trainer.data.chat.read.conversation import read_columns
from trainer.data.chat.read.hub_dataset import is_saved, open_hub, open_saved
from trainer.data.errors import DataError
from trainer.data.tables.file_part import open_files


class Part(Protocol):
    """A random-access list of raw rows. It can be pickled: another process opens its files again.

    Reading rows in ascending ranges is fast for every kind of file; going back costs a new start in compressed ones.
    """

    @property
    def name(self) -> str:
        """What it is called in messages and counts."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows, blank lines not among them. The first question may take a pass over the files.

        Raises:
            PlacedError: a file cannot be read.
        """
        ...

    @property
    def key(self) -> dict[str, Any]:
        """JSON-able identity of the contents, from sizes, times and samples: no file is read whole."""
        ...

    def rows(self, start: int, stop: int) -> Iterator[dict[str, Any]]:
        """The rows from `start` up to `stop`, 0 <= start <= stop <= num_rows, as their file has them.

        Columnar files pad objects with nulls to have the same fields in every row. Those nulls are left out at every
        depth, and JSON columns are decoded; nulls in text files and in JSON columns were written and stay.

        Raises:
            PlacedError: a row is damaged, or the file changed since it was opened.
        """
        ...

    def place(self, row: int) -> str:
        """Where a row is, counted from 1, for messages: "chats.jsonl, line 12", "chats.parquet, row 12"."""
        ...


def open_parts(config: ChatConfig) -> list[Part]:
    """The parts that a config names, in order. Rows are not read.

    Raises:
        ConfigError: with one fault for each part that is missing, unclear, damaged, or without a column for messages.
    """
    key = "data.name" if isinstance(config, SFTDataConfig) else "val.data.name"
    parts: list[Part] = []
    faults = []
    for part in config.parts:
        try:
            parts.append(_open_part(part))
        except DataError as error:
            faults.append(Fault(key=key, message=str(error)))
    if faults:
        raise ConfigError(faults)
    return parts


def _open_part(part: ChatPart) -> Part:
    path = Path(part.name)
    try:
        if not path.exists():
            if not is_dataset_id(part.name):
                raise DataError(f"{path} does not exist")
            return open_hub(part)
        if path.is_file():
            if part.subset is not None:
                raise DataError(f"{path} is a file and has no subset {part.subset!r}")
            return open_files(path, part.split, read_columns)
        if part.subset is not None:
            path = path / part.subset
            if not path.is_dir():
                raise DataError(f"there is no folder {path} for the subset {part.subset!r} of {part.name}")
        return open_saved(path, part.split) if is_saved(path) else open_files(path, part.split, read_columns)
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error
