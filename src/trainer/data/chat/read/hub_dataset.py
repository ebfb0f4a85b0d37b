"""Datasets of the Hugging Face hub, and folders that `datasets` saved: tables on disk, mapped into memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.data import ChatPart
from trainer.data.chat.read.conversation import read_columns
from trainer.data.errors import DataError, PlacedError
from trainer.data.tables.arrow_rows import RowMaker
from trainer.data.tables.local_files import content_key, list_tables
from trainer.text import first_line, listed

if TYPE_CHECKING:
    from datasets import Dataset

_SLICE = 256
"""Rows turned into Python objects at once."""

_LONGEST_CAUSE = 300
_DATASET, _DATASET_DICT = "state.json", "dataset_dict.json"


class DatasetPart:
    """A Part that is a table of `datasets`. Pickled, it names its files; nothing is loaded again from the hub."""

    def __init__(self, name: str, dataset: "Dataset", key: dict[str, Any]) -> None:
        """Raises:
        DataError: no column holds messages.
        """
        columns = read_columns(dataset.column_names, name)
        self.name = name
        self.key = {"rows": len(dataset), "fingerprint": dataset._fingerprint, **key}
        self._table = dataset.select_columns(columns).with_format("arrow")

    @property
    def num_rows(self) -> int:
        return len(self._table)

    def rows(self, start: int, stop: int) -> Iterator[dict[str, Any]]:
        for first in range(start, stop, _SLICE):
            try:
                table: Any = self._table[first : min(first + _SLICE, stop)]
                yield from RowMaker(table.schema).rows(table)
            except (OSError, ValueError) as error:
                message = f"{self.name}, rows from {first + 1} on, cannot be read: {first_line(error)}"
                raise PlacedError(message) from error

    def place(self, row: int) -> str:
        return f"{self.name}, row {row + 1}"


def is_saved(folder: Path) -> bool:
    """Whether `datasets` saved the folder (`save_to_disk`)."""
    return (folder / _DATASET).is_file() or (folder / _DATASET_DICT).is_file()


def open_saved(folder: Path, split: str | None) -> DatasetPart:
    """A folder that `datasets` saved; of several splits the one asked for, else "train".

    Raises:
        DataError: it is damaged, or has no such split.
        OSError: it cannot be read.
    """
    from datasets import Dataset, load_from_disk

    try:
        loaded = load_from_disk(str(folder))
    except IndexError as error:  # `datasets` writes no table of no rows, and cannot read that
        raise DataError(f"{folder} was saved without rows, or a split of it was; leave that out") from error
    except Exception as error:  # damaged tables raise every kind
        raise DataError(f"{folder} cannot be read: {_cause(error)}") from error
    if isinstance(loaded, Dataset):
        own = str(loaded.split or "train")
        if split not in (None, own):
            raise DataError(
                f"{folder} has no split {split!r}: it is one dataset, saved as {own!r}; leave the split out"
            )
        return DatasetPart(str(folder), loaded, content_key(list_tables(folder), folder))
    chosen = split or "train"
    if chosen not in loaded:
        there = listed([repr(str(name)) for name in loaded])
        raise DataError(f"{folder} has no split {chosen!r}; its splits are {there}: say in splits which to take")
    tables = list_tables(folder / chosen)
    return DatasetPart(f"{folder} ({chosen})", loaded[chosen], content_key(tables, folder / chosen))


def open_hub(part: ChatPart) -> DatasetPart:
    """A dataset of the hub, downloaded where its cache does not have it. Code in it never runs.

    Raises:
        DataError: the hub or its cache does not give it, or the cache alone would not say which subset is meant.
    """
    from datasets import load_dataset

    split = part.split or "train"
    name = f"{part.name} ({', '.join(text for text in (part.subset, split) if text)})"
    try:
        dataset: Any = load_dataset(part.name, part.subset, split=split)
    except Exception as error:  # datasets, the hub's client and its network raise every kind
        raise DataError(
            f"there is no file or folder {part.name} here, and the Hugging Face hub does not give the dataset {name}: "
            f"{_cause(error)}. Without network, download it where there is one and copy the hub's cache (HF_HOME), or "
            "give a .jsonl or .parquet file"
        ) from error
    if part.subset is None:
        _check_only_subset(part.name, dataset)
    return DatasetPart(name, dataset, {})


def _check_only_subset(name: str, dataset: "Dataset") -> None:
    """The workers of a run have the cache only, and there no subset is the default.

    Raises:
        DataError: the cache holds others.
    """
    for file in dataset.cache_files[:1]:
        *_, own, version, revision, _ = Path(file["filename"]).parts  # of <cache>/<dataset>/
        found = sorted(path.parts[-3] for path in Path(file["filename"]).parents[3].glob(f"*/{version}/{revision}"))
        if found != [own]:
            raise DataError(
                f"the cache of datasets holds {name} with the subsets {listed(found)}: say which to take, that of the "
                f'hub\'s choice is subsets = ["{own}"]'
            )


def _cause(error: Exception) -> str:
    return " ".join(str(error).split())[:_LONGEST_CAUSE].rstrip(".") or type(error).__name__
