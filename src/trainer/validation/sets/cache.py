"""Tokenised sets of text on disk: made once, then found by every rank, round and run whose tokens would be the same."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from configs.errors import ConfigError
from trainer.data.cache_folder import CacheFolder, cache_name
from trainer.data.drops import Drop, DropCounts
from trainer.data.errors import PlacedError
from trainer.data.row import Track
from trainer.validation.sets.encode import SEQUENCE, Chunk, RowEncoder
from trainer.validation.sets.kinds import Kind
from trainer.validation.sets.text_encoder import TextEncoder
from trainer.validation.windows import KEY

if TYPE_CHECKING:
    from trainer.data.tables.file_part import FilePart

_FORMAT = 2
"""Goes up with every change of what the files hold, or of how rows become tokens."""

_TOKENS, _SEQUENCES, _RECORD = "tokens.bin", "sequences.bin", "cache.json"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a cache says of itself."""

    name: str
    """Of its folder."""

    num_rows: int
    """Those that have no sequence included."""

    num_tokens: int
    num_sequences: int

    left_out: dict[str, Drop]
    """Rows without sequences, by reason."""

    noted: dict[str, Drop]
    """Rows of which something is to be told."""

    max_id: int
    """Largest token id; -1 where there is no token."""

    max_id_place: str

    tokens_digest: str
    sequences_digest: str


_ADAPTER = TypeAdapter(Record)


class TextCache:
    """The tokens of a set, memory-mapped. Any thread may read them at any time."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            OSError, ValueError: it is not whole.
        """
        self.record = _ADAPTER.validate_json((folder / _RECORD).read_bytes())
        if self.record.name != folder.name:
            raise ValueError(f"its {_RECORD} is that of {self.record.name}")
        self.ids = _map(folder / _TOKENS, np.dtype("<i4"), self.record.num_tokens)
        """(tokens,) int32: all sequences, one after the other"""
        self.sequences = _map(folder / _SEQUENCES, SEQUENCE, self.record.num_sequences)
        """(sequences,) SEQUENCE"""
        written = (self.record.tokens_digest, self.record.sequences_digest)
        for name, values, digest in zip((_TOKENS, _SEQUENCES), (self.ids, self.sequences), written, strict=True):
            if blake2b(values.data.cast("B"), digest_size=16).hexdigest() != digest:
                raise ValueError(f"its {name} is not what was written")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be tokenised, and how."""

    set_name: str
    part: "FilePart"
    kind: Kind
    encoder: TextEncoder
    max_documents: int | None

    @property
    def cache_name(self) -> str:
        """By all that changes tokens."""
        content = {
            "format": _FORMAT,
            "part": self.part.key,
            "kind": self.kind,
            "encoder": self.encoder.digest,
            "max_documents": self.max_documents,
        }
        return cache_name(self.part.name, content)


def open_or_build(work: Work, *, cache_dir: Path, track: Track) -> TextCache:
    """The tokens of a set: those in the cache, where it has them, else they are made first.

    Many processes may call it at the same time, on many machines that share the folder; one of them does the work.

    Args:
        cache_dir: folder of caches.
        track: told of the rows that are done.

    Raises:
        ConfigError: about the first row that cannot be scored, with its place; or cache_dir cannot be used.
        RunError: the disk is full.
    """
    folder = CacheFolder(cache_dir, work.cache_name, key="val.cache_dir")
    return folder.open_or_make(f"held-out set {work.set_name}", TextCache, lambda new: _build(new, folder, work, track))


def _map(path: Path, dtype: np.dtype[Any], count: int) -> np.ndarray:
    size = path.stat().st_size
    if size != count * dtype.itemsize:
        raise ValueError(f"its {path.name} has {size:,} bytes, not {count * dtype.itemsize:,}")
    # An empty file cannot be mapped.
    return np.asarray(np.memmap(path, dtype, "r")) if count else np.empty(0, dtype)


def _build(new: Path, folder: CacheFolder, work: Work, track: Track) -> None:
    """Write the files of the cache `folder` into the folder `new`."""
    try:
        num_rows = min(work.part.num_rows, work.max_documents or work.part.num_rows)
        what = f"tokenising held-out set {work.set_name}"
        track(what, 0, num_rows)
        tally = _Tally()
        with ExitStack() as stack:
            with folder.named_faults():
                opened = [(new / name).open("xb") for name in (_TOKENS, _SEQUENCES)]
                files = [stack.enter_context(_quiet_after_faults(file)) for file in opened]
            for chunk in RowEncoder(work.part, work.kind, work.encoder).chunks(num_rows):
                with folder.named_faults():
                    tally.write(chunk, files)
                track(what, tally.num_rows, num_rows)
            with folder.named_faults():
                for file in files:
                    file.close()
        record = tally.record(folder.path.name, work.part.place)
    except PlacedError as error:
        raise ConfigError.one(KEY, str(error)) from error
    with folder.named_faults():
        (new / _RECORD).write_bytes(_ADAPTER.dump_json(record, indent=1))


@contextmanager
def _quiet_after_faults(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """Closes a file that may be closed. What it cannot write any more was a fault before."""
    try:
        yield file
    finally:
        with suppress(OSError):
            file.close()


@dataclass(kw_only=True)
class _Tally:
    """What is added up over the chunks."""

    num_rows: int = 0
    num_tokens: int = 0
    num_sequences: int = 0
    max_id: int = -1
    max_id_row: int = 0
    left_out: DropCounts = field(default_factory=DropCounts)
    noted: DropCounts = field(default_factory=DropCounts)

    def __post_init__(self) -> None:
        self._digests = [blake2b(digest_size=16) for _ in range(2)]

    def write(self, chunk: Chunk, files: Sequence[IO[bytes]]) -> None:
        """Append a chunk to the files of tokens and sequences."""
        if chunk.ids.size and (largest := int(chunk.ids.max())) > self.max_id:
            place = np.searchsorted(chunk.sequences["end"], int(chunk.ids.argmax()), "right")
            self.max_id, self.max_id_row = largest, int(chunk.sequences["document"][place])
        sequences = chunk.sequences.copy()
        sequences["end"] += self.num_tokens
        for file, digest, values in zip(files, self._digests, (chunk.ids.astype("<i4"), sequences), strict=True):
            content = values.tobytes()
            file.write(content)
            digest.update(content)
        self.num_rows += chunk.num_rows
        self.num_tokens += chunk.ids.size
        self.num_sequences += sequences.size
        self.left_out.add(chunk.left_out)
        self.noted.add(chunk.noted)

    def record(self, name: str, place: Callable[[int], str]) -> Record:
        tokens_digest, sequences_digest = (digest.hexdigest() for digest in self._digests)
        return Record(
            name=name,
            num_rows=self.num_rows,
            num_tokens=self.num_tokens,
            num_sequences=self.num_sequences,
            left_out=self.left_out.drops(place),
            noted=self.noted.drops(place),
            max_id=self.max_id,
            max_id_place=place(self.max_id_row) if self.max_id >= 0 else "",
            tokens_digest=tokens_digest,
            sequences_digest=sequences_digest,
        )
