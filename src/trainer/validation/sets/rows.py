"""The files of a held-out set of text, and the kind that their columns make."""

from pathlib import Path

from trainer.data.errors import DataError
from trainer.data.tables.file_part import FilePart, open_files
from trainer.data.tables.local_files import only_split
from trainer.validation.sets.kinds import Kind, columns_of, find_kind


def open_rows(path: Path) -> tuple[FilePart, Kind]:
    """The rows of a file or folder, and their kind.

    Raises:
        DataError: there are none, it is not clear which, or their columns make no kind.
        OSError: they cannot be read.
    """
    found = _Columns()
    part = open_files(path, only_split(path) if path.is_dir() else None, found.choose)
    if not part.num_rows:
        raise DataError(f"{path} holds no rows")
    if found.kind is None:
        found.choose(list(next(iter(part.rows(0, 1)))), part.place(0))
    assert found.kind is not None
    return part, found.kind


class _Columns:
    """The kind of the files of a set."""

    def __init__(self) -> None:
        self.kind: Kind | None = None
        self._read: list[str] = []

    def choose(self, names: list[str], file: str) -> list[str]:
        """Those of a file that are read.

        Raises:
            DataError: they make no kind, or another than those of the files before.
        """
        kind = find_kind(names, file)
        read = [name for name in columns_of(kind) if name in names]
        if self.kind is not None and (kind, read) != (self.kind, self._read):
            raise DataError(
                f"{file} has the columns {', '.join(read)} ({kind}), the files before it {', '.join(self._read)} "
                f"({self.kind})"
            )
        self.kind, self._read = kind, read
        return read
