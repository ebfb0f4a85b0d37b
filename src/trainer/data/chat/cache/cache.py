"""Tokenised conversations on disk: made once, then found by everybody whose ids and masks would be the same."""

from contextlib import closing
from pathlib import Path

import numpy as np

from configs.errors import ConfigError
from trainer.data.cache_folder import CacheFolder, cache_name
from trainer.data.chat.cache.files import SAMPLES, TOKENS, TableWriter, open_tables
from trainer.data.chat.cache.pool import default_workers, tokenise_part
from trainer.data.chat.cache.record import RECORD, Record, read_record, write_record
from trainer.data.chat.cache.tokenise import Chunk, Tokeniser, Work
from trainer.data.chat.sample import Sample
from trainer.data.drops import DropCounts
from trainer.data.errors import PlacedError
from trainer.data.row import Track

_FORMAT = 1
"""Goes up with every change of what the files hold, or of how rows become tokens."""


class SampleCache:
    """The samples of a part, memory-mapped. Any thread may read any sample at any time."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            OSError, ValueError: it is not whole.
        """
        self.record = read_record(folder)
        if self.record.name != folder.name:
            raise ValueError(f"its {RECORD} is that of {self.record.name}")
        for name, size in self.record.sizes.items():
            if (folder / name).stat().st_size != size:
                raise ValueError(f"its {name} does not have {size:,} bytes")
        tables = open_tables(folder)
        if tables.lengths.size != self.record.num_samples:
            raise ValueError(f"its {SAMPLES} does not have {self.record.num_samples:,} samples")
        self._batches = tables.batches
        self._batch_starts = np.cumsum([0, *(ids.size for ids, _ in tables.batches)])
        self._starts = np.cumsum(tables.lengths) - tables.lengths
        self.lengths = tables.lengths
        """(n,) int64: tokens of each sample"""
        self.loss_tokens = tables.loss_tokens
        """(n,) int64: those that carry loss"""
        self.rows = tables.rows
        """(n,) int64: the row of the part that it comes from; ascending"""

    def read(self, number: int) -> Sample:
        """Sample `number`, 0 <= number < n, without a copy: its arrays cannot be written to."""
        start = int(self._starts[number])
        batch = int(np.searchsorted(self._batch_starts, start, "right")) - 1
        start -= int(self._batch_starts[batch])
        place = slice(start, start + int(self.lengths[number]))
        ids, loss = self._batches[batch]
        return Sample(input_ids=ids[place], loss=loss[place])


def open_or_build(work: Work, *, cache_dir: Path, workers: int | None, track: Track) -> SampleCache:
    """The samples of a part: those in the cache, where it has them, else they are made first.

    Many processes may call it at the same time, on many machines that share the folder; one of them does the work.

    Args:
        work: the part, and how its rows become tokens.
        cache_dir: folder of caches.
        workers: processes that tokenise; None for one per core. What they make does not depend on it.
        track: told of the rows that are done.

    Raises:
        ConfigError: about the first row that nobody should train over, with its place; or tokenizer, chat template or
            cache_dir cannot be used.
        RunError: the disk is full, or a worker was killed.
    """
    tokeniser = Tokeniser(work)
    try:
        folder = CacheFolder(cache_dir, _name(tokeniser), key=f"{work.key}.cache_dir")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError.one(f"{work.key}.name", f"{work.part.name} cannot be read: {reason}") from error
    return folder.open_or_make(
        work.part.name,
        SampleCache,
        lambda new: _build(new, folder, tokeniser, workers or default_workers(), track),
    )


def _name(tokeniser: Tokeniser) -> str:
    """Name of the cache's folder, by all that changes ids or masks."""
    work = tokeniser.work
    content = {
        "format": _FORMAT,
        "part": work.part.key,
        "encoder": tokeniser.encoder.key,
        "renderer": tokeniser.renderer.key,
        "roles": sorted(work.rules.roles),
        "last_turn_only": work.rules.last_turn_only,
    }
    return cache_name(work.part.name, content)


def _build(new: Path, folder: CacheFolder, tokeniser: Tokeniser, workers: int, track: Track) -> None:
    """Write the files of the cache `folder` into the folder `new`."""
    work, tally = tokeniser.work, _Tally()
    try:
        num_rows = work.part.num_rows
    except PlacedError as error:
        raise ConfigError.one(f"{work.key}.name", str(error)) from error
    if not num_rows:
        raise ConfigError.one(f"{work.key}.name", f"{work.part.name} holds no rows")
    what = f"tokenising {work.part.name}"
    track(what, 0, num_rows)
    with folder.named_faults():
        writer = TableWriter(new)
    with closing(writer), closing(tokenise_part(tokeniser, workers=workers)) as chunks:
        for chunk in chunks:
            with folder.named_faults():
                writer.add(chunk)
            tally.add(chunk)
            track(what, tally.num_rows, num_rows)
        with folder.named_faults():
            digest = writer.finish()
    place = work.part.place
    with folder.named_faults():
        tables = open_tables(new)
        longest = int(tables.lengths.argmax()) if tables.lengths.size else None
        record = Record(
            name=folder.path.name,
            num_rows=num_rows,
            dropped=tally.dropped.drops(place),
            num_samples=tables.lengths.size,
            split_control_tokens=tally.split_control_tokens,
            tokens=int(tables.lengths.sum()),
            loss_tokens=int(tables.loss_tokens.sum()),
            longest=0 if longest is None else int(tables.lengths[longest]),
            longest_place="" if longest is None else place(int(tables.rows[longest])),
            max_id=tally.max_id,
            max_id_place="" if longest is None else place(tally.max_id_row),
            digest=digest,
            sizes={file: (new / file).stat().st_size for file in (TOKENS, SAMPLES)},
        )
        write_record(record, new)


class _Tally:
    """What the files do not show, added up over the chunks of a part."""

    def __init__(self) -> None:
        self.num_rows = self.split_control_tokens = self.max_id_row = 0
        self.max_id = -1
        self.dropped = DropCounts()

    def add(self, chunk: Chunk) -> None:
        self.num_rows += chunk.num_rows
        self.split_control_tokens += chunk.split_control_tokens
        self.dropped.add(chunk.dropped)
        if chunk.input_ids.max(initial=-1) > self.max_id:
            largest = int(chunk.input_ids.argmax())
            sample = np.searchsorted(np.cumsum(chunk.lengths), largest, "right")
            self.max_id, self.max_id_row = int(chunk.input_ids[largest]), int(chunk.rows[sample])
