"""What a cache of tokenised conversations says of itself, in its `cache.json`."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

RECORD = "cache.json"


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Rows that gave nothing."""

    count: int

    first_place: str
    """Where the first of them is."""


@dataclass(frozen=True, kw_only=True)
class CacheCounts:
    """What became of the rows of a part."""

    rows: int

    dropped: dict[str, Drop]
    """Rows without a sample, by reason."""

    split_control_tokens: int
    """Times that message text spells a control token, in samples; it is ordinary text there."""

    tokens: int
    loss_tokens: int

    longest: int
    """Tokens of the longest sample; 0 where there is none."""

    longest_place: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is in the file."""

    name: str
    """Of the folder."""

    num_samples: int
    counts: CacheCounts

    max_id: int
    """Largest token id; -1 where there is no token."""

    max_id_place: str

    digest: str
    """Of all ids and masks."""

    sizes: dict[str, int]
    """Bytes of the other files, by name."""


_RECORD = TypeAdapter(Record)


def encode_record(record: Record) -> bytes:
    return _RECORD.dump_json(record, indent=1)


def read_record(folder: Path) -> Record:
    """
    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    return _RECORD.validate_json((folder / RECORD).read_bytes())
