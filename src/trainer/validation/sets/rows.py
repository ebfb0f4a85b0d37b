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
    found: list[tuple[Kind, list[str]]] = []

    def choose(names: list[str], file: str) -> list[str]:
        """The columns of a file that are read."""
        kind = find_kind(names, file)
        read = [name for name in columns_of(kind) if name in names]
        if found and found[0] != (kind, read):
            before_kind, before = found[0]
            raise DataError(
                f"{file} has the columns {', '.join(read)} ({kind}), the files before it {', '.join(before)} "
                f"({before_kind})"
            )
        found.append((kind, read))
        return read

    part = open_files(path, only_split(path) if path.is_dir() else None, choose)
    if not part.num_rows:
        raise DataError(f"{path} holds no rows")
    if not found:  # files of lines, which have their columns row by row
        choose(list(next(iter(part.rows(0, 1)))), part.place(0))
    return part, found[0][0]
