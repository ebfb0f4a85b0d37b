"""Tokenised conversations on disk: made once, then found by everybody whose ids and masks would be the same."""

import logging
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from configs.errors import ConfigError
from configs.renderer import RendererConfig
from trainer.data.chat.cache.files import SAMPLES, TOKENS, TableWriter, open_tables
from trainer.data.chat.cache.folder import CacheFolder
from trainer.data.chat.cache.key import cache_name
from trainer.data.chat.cache.pool import default_workers, tokenise_part
from trainer.data.chat.cache.record import RECORD, CacheCounts, Drop, Record, encode_record, read_record
from trainer.data.chat.cache.tokenise import Chunk, Tokeniser, Work
from trainer.data.chat.read.conversation import LossRules
from trainer.data.chat.read.parts import Part
from trainer.data.chat.sample import PlacedError, Sample
from trainer.data.row import Track
from trainer.text import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class SampleCache:
    """The samples of a part, memory-mapped. Any thread may read any sample at any time."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            OSError, ValueError: it is not whole.
        """
        self._record = read_record(folder)
        if self._record.name != folder.name:
            raise ValueError(f"its {RECORD} is that of {self._record.name}")
        for name, size in self._record.sizes.items():
            if (folder / name).stat().st_size != size:
                raise ValueError(f"its {name} does not have {size:,} bytes")
        tables = open_tables(folder)
        if tables.lengths.size != self._record.num_samples:
            raise ValueError(f"its {SAMPLES} does not have {self._record.num_samples:,} samples")
        self._batches = tables.batches
        self._batch_starts = np.cumsum([0, *(ids.size for ids, _ in tables.batches)])
        self._starts = np.cumsum(tables.lengths) - tables.lengths
        self.lengths = tables.lengths
        """(n,) int64: tokens of each sample"""
        self.loss_tokens = tables.loss_tokens
        """(n,) int64: those that carry loss"""
        self.rows = tables.rows
        """(n,) int64: the row of the part that it comes from; ascending"""

    @property
    def num_samples(self) -> int:
        return self._record.num_samples

    @property
    def counts(self) -> CacheCounts:
        return self._record.counts

    @property
    def digest(self) -> str:
        """Of all ids and masks."""
        return self._record.digest

    @property
    def max_id(self) -> int:
        """Largest token id; -1 where there is no sample."""
        return self._record.max_id

    @property
    def max_id_place(self) -> str:
        """The first row that has it."""
        return self._record.max_id_place

    def read(self, number: int) -> Sample:
        """Sample `number`, 0 <= number < num_samples, without a copy: its arrays cannot be written to."""
        start = int(self._starts[number])
        batch = int(np.searchsorted(self._batch_starts, start, "right")) - 1
        start -= int(self._batch_starts[batch])
        place = slice(start, start + int(self.lengths[number]))
        ids, loss = self._batches[batch]
        return Sample(input_ids=ids[place], loss=loss[place])


def open_or_build(
    part: Part,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    renderer_config: RendererConfig,
    rules: LossRules,
    cache_dir: Path,
    workers: int | None,
    track: Track,
    key: str = "data",
) -> SampleCache:
    """The samples of a part: those in the cache, where it has them, else they are made first.

    Many processes may call it at the same time, on many machines that share the folder; one of them does the work.

    Args:
        cache_dir: folder of caches.
        workers: processes that tokenise; None for one per core. What they make does not depend on it.
        track: told of the rows that are done.
        key: the table of the config that names the part, `data` or `val.data`.

    Raises:
        ConfigError: about the first row that nobody should train over, with its place; or tokenizer, chat template or
            cache_dir cannot be used.
        RunError: the disk is full, or a worker was killed.
    """
    tokeniser = Tokeniser(Work(part=part, tokenizer=tokenizer, renderer=renderer_config, rules=rules, key=key))
    try:
        folder = CacheFolder(cache_dir, cache_name(part, tokeniser), key=f"{key}.cache_dir")
    except OSError as error:
        raise ConfigError.one(f"{key}.name", f"{part.name} cannot be read: {error.strerror or error}") from error
    found = _find(folder.path, say=True)
    if found is not None:
        return found
    with folder.lock(
        is_made=lambda: _find(folder.path) is not None,
        on_wait=lambda: log.info("another process tokenises %s; waiting for it", part.name),
    ):
        found = _find(folder.path)
        if found is None:
            with folder.making() as new:
                _build(new, folder, tokeniser, workers or default_workers(), track)
                folder.publish(new, is_whole=lambda: _find(folder.path) is not None)
            found = SampleCache(folder.path)
    return found


def _find(folder: Path, *, say: bool = False) -> SampleCache | None:
    """The cache in a folder; None where there is none that is whole."""
    if not folder.exists():
        return None
    try:
        return SampleCache(folder)
    except (OSError, ValueError) as error:
        if say:
            reason = first_line(error)
            log.warning("the tokenised conversations in %s are damaged and are made anew: %s", folder, reason)
        return None


def _build(new: Path, folder: CacheFolder, tokeniser: Tokeniser, workers: int, track: Track) -> None:
    """Write the files of the cache `folder` into the folder `new`."""
    part = tokeniser.work.part
    what, num_rows, done = f"tokenising {part.name}", _count_rows(tokeniser.work), 0
    counting = _Counting(part)
    track(what, 0, num_rows)
    with folder.named_faults():
        writer = TableWriter(new)
    with closing(writer), closing(tokenise_part(tokeniser, workers=workers)) as chunks:
        for chunk in chunks:
            with folder.named_faults():
                writer.add(chunk)
            counting.add(chunk)
            done += chunk.num_rows
            track(what, done, num_rows)
        with folder.named_faults():
            digest = writer.finish()
    with folder.named_faults():
        sizes = {file: (new / file).stat().st_size for file in (TOKENS, SAMPLES)}
        (new / RECORD).write_bytes(encode_record(counting.record(folder.path.name, digest, sizes)))


def _count_rows(work: Work) -> int:
    try:
        return work.part.num_rows
    except PlacedError as error:
        raise ConfigError.one(f"{work.key}.name", str(error)) from error


class _Counting:
    """Counts over the chunks of a part."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._rows = self._samples = self._split = self._tokens = self._loss_tokens = 0
        self._dropped: dict[str, tuple[int, int]] = {}
        self._longest = self._max_id = (-1, 0)

    def add(self, chunk: Chunk) -> None:
        self._rows += chunk.num_rows
        self._split += chunk.split_control_tokens
        for reason, (count, first) in chunk.dropped.items():
            before, first = self._dropped.get(reason, (0, first))
            self._dropped[reason] = (before + count, first)
        if not chunk.rows.size:
            return
        self._samples += chunk.rows.size
        self._tokens += chunk.input_ids.size
        self._loss_tokens += int(chunk.loss_tokens.sum())
        longest = int(chunk.lengths.argmax())
        if chunk.lengths[longest] > self._longest[0]:
            self._longest = (int(chunk.lengths[longest]), int(chunk.rows[longest]))
        largest = int(chunk.input_ids.argmax())
        if chunk.input_ids[largest] > self._max_id[0]:
            sample = np.searchsorted(np.cumsum(chunk.lengths), largest, "right")
            self._max_id = (int(chunk.input_ids[largest]), int(chunk.rows[sample]))

    def record(self, name: str, digest: str, sizes: dict[str, int]) -> Record:
        place = self._part.place
        return Record(
            name=name,
            num_samples=self._samples,
            counts=CacheCounts(
                rows=self._rows,
                dropped={
                    reason: Drop(count=count, first_place=place(first))
                    for reason, (count, first) in self._dropped.items()
                },
                split_control_tokens=self._split,
                tokens=self._tokens,
                loss_tokens=self._loss_tokens,
                longest=max(0, self._longest[0]),
                longest_place=place(self._longest[1]) if self._samples else "",
            ),
            max_id=self._max_id[0],
            max_id_place=place(self._max_id[1]) if self._samples else "",
            digest=digest,
            sizes=sizes,
        )
