"""What a cache of tokenised conversations says of itself, in its `cache.json`."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from trainer.data.drops import Drop

RECORD = "cache.json"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is in the file."""

    name: str
    """Of the folder."""

    num_rows: int
    """Of the part, unusable ones included."""

    dropped: dict[str, Drop]
    """Rows without a sample, by reason."""

    num_samples: int

    split_control_tokens: int
    """Times that message text spells a control token, in samples; it is ordinary text there."""

    tokens: int
    loss_tokens: int

    longest: int
    """Tokens of the longest sample; 0 where there is none."""

    longest_place: str

    max_id: int
    """Largest token id; -1 where there is no sample."""

    max_id_place: str
    """The first row that has it."""

    digest: str
    """Of all ids and masks."""

    sizes: dict[str, int]
    """Bytes of the other files, by name."""


_RECORD = TypeAdapter(Record)


def write_record(record: Record, folder: Path) -> None:
    (folder / RECORD).write_bytes(_RECORD.dump_json(record, indent=1))


def read_record(folder: Path) -> Record:
    """
    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    return _RECORD.validate_json((folder / RECORD).read_bytes())
