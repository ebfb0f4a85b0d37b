"""Counts of what an epoch holds, from sizes and indices as far as they go.

What would need a long read (document ends of a huge pool, its loss files) is counted from a sample or left open, and
said so, unless everything is asked for. A data type that knows better than its rows brings one function and one `case`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from models.batch import IGNORE_INDEX
from trainer.data.chat.counts import ChatCounts
from trainer.data.chat.source import ChatSource
from trainer.data.fake import FakeSource
from trainer.data.row import RowError, Rows, RowSource, Track
from trainer.data.shard import index_path, map_shard
from trainer.data.shards import TokenPool
from trainer.data.tokens import TokensSource

MAX_LOSS_BYTES = 1 << 31
"""Bytes of loss files that are read unasked: a few seconds."""

MAX_ENDS = 1 << 26
"""Document ends that are read unasked: 512 MiB of index."""

MAX_FILLED_TOKENS = 1 << 24
"""Tokens of rows that are made unasked, where only the rows themselves show their documents."""

_SAMPLED_BLOCKS = 256
_SAMPLED_ENDS = 1 << 16
_BLOCK_ENDS = 1 << 22
_BLOCK_BYTES = 1 << 26
_MAX_BINS = 64


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of documents (or samples), in tokens."""

    counted: int
    """Documents whose lengths were read: all of them, or a sample. Those without tokens are left out."""

    longest: int
    total: int
    """Sum of the lengths."""

    longer_than_row: int
    """Documents of more than seq_len tokens."""

    bins: list[int]
    """bins[i]: documents of 2^i to 2^(i+1) - 1 tokens; ends with the last that is not 0."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What an epoch holds. None: not counted, and a note says why."""

    epoch: int
    rows: int
    tokens: int | None
    """Tokens of the data, padding left out; of chats those of the epoch."""

    left_out_tokens: int
    """Those of them that the epoch reads in no row."""

    positions: int
    """rows * seq_len."""

    padding_tokens: int | None
    loss_tokens: int | None
    documents: int | None
    truncated: int = 0
    """Samples cut to fit into a row."""

    dropped: int = 0
    """Samples left out for good."""

    lengths: Lengths | None
    exact_lengths: bool
    """`lengths` holds every document."""

    notes: list[str]
    """What was not counted exactly, and why."""

    chats: ChatCounts | None = None
    """What only conversations have; the documents are then samples."""


def count(source: RowSource, *, epoch: int, scan: bool, track: Track) -> Counts:
    """Count an epoch of a source.

    Args:
        scan: read whatever it takes to count everything exactly.

    Raises:
        RowError: a file changed, or an index is found damaged.
    """
    match source:
        case TokensSource():
            return _count_tokens(source, epoch, scan, track)
        case FakeSource():
            return _count_fake(source, epoch, scan, track)
        case ChatSource():
            return _count_chats(source, epoch)
    return _count_rows(source, epoch, scan, track)


def _count_tokens(source: TokensSource, epoch: int, scan: bool, track: Track) -> Counts:
    pool, notes = source.pool, []
    targets_of_files = sum(shard.num_tokens for shard in pool.shards if shard.has_loss)
    loss_tokens = None
    if scan or targets_of_files <= MAX_LOSS_BYTES:
        left_out = sum(_count_targets(pool, start, length) for start, length in source.left_out_targets(epoch))
        without_file = pool.num_tokens - targets_of_files
        loss_tokens = without_file + _read_loss_files(pool, targets_of_files, track) - left_out
    else:
        notes.append(
            f"loss tokens are not counted: {targets_of_files:,} bytes of loss files to read; --scan reads them"
        )
    lengths, exact = None, False
    if pool.chunk_shuffled is not None:
        notes.append(
            f"documents are not counted: {pool.chunk_shuffled} is chunk-shuffled, its index has other ends too"
        )
    else:
        exact = scan or pool.num_documents <= MAX_ENDS
        lengths = _read_lengths(pool, source.seq_len, exact, track)
    if lengths is not None and not exact:
        notes.append(f"document lengths are those of {lengths.counted:,} documents all over the pool; --scan reads all")
    return Counts(
        epoch=epoch,
        rows=source.num_rows,
        tokens=pool.num_tokens,
        left_out_tokens=source.left_out_tokens,
        positions=source.num_rows * source.seq_len,
        padding_tokens=0,
        loss_tokens=loss_tokens,
        documents=None if lengths is None else pool.num_documents,
        lengths=lengths,
        exact_lengths=exact,
        notes=notes,
    )


def _count_targets(pool: TokenPool, start: int, length: int) -> int:
    mask = pool.loss_mask(start, length)
    return length if mask is None else int(mask.sum())


def _read_loss_files(pool: TokenPool, total: int, track: Track) -> int:
    """Tokens that the loss files count as targets."""
    found = done = 0
    for shard in pool.shards:
        loss = map_shard(shard).loss if shard.has_loss else None
        for low in range(0, 0 if loss is None else len(loss), _BLOCK_BYTES):
            block = loss[low : low + _BLOCK_BYTES]  # type: ignore[index]
            found += int(np.count_nonzero(block))
            done += len(block)
            track("loss files (bytes)", done, total)
    return found


def _read_lengths(pool: TokenPool, seq_len: int, exact: bool, track: Track) -> Lengths:
    entries = [shard.num_documents for shard in pool.shards]
    blocks = list(_all_blocks(entries) if exact else _spread_blocks(entries))
    tally, done = LengthTally(seq_len), 0
    total = sum(high - low for _, low, high in blocks)
    for number, low, high in blocks:
        shard = pool.shards[number]
        ends = map_shard(shard).index[max(low - 1, 0) : high]
        if (ends[1:] < ends[:-1]).any() or int(ends[-1]) > shard.num_tokens:
            raise RowError(
                f"{index_path(shard.path)} is damaged: its document ends between entries {low} and {high} do not ascend"
            )
        tally.add(np.diff(ends, prepend=np.zeros(1, ends.dtype)) if low == 0 else np.diff(ends))
        done += high - low
        track("document ends", done, total)
    return tally.lengths()


def _all_blocks(entries: list[int]) -> Iterator[tuple[int, int, int]]:
    """(shard, first, last + 1) of index entries."""
    for number, size in enumerate(entries):
        for low in range(0, size, _BLOCK_ENDS):
            yield number, low, min(low + _BLOCK_ENDS, size)


def _spread_blocks(entries: list[int]) -> Iterator[tuple[int, int, int]]:
    """The same for blocks at even distances over all entries; none goes over the end of its shard."""
    lasts = np.cumsum(entries)
    for block in range(_SAMPLED_BLOCKS):
        place = block * int(lasts[-1]) // _SAMPLED_BLOCKS
        number = int(np.searchsorted(lasts, place, "right"))
        low = place - int(lasts[number]) + entries[number]
        yield number, low, min(low + _SAMPLED_ENDS, entries[number])


def _count_fake(source: FakeSource, epoch: int, scan: bool, track: Track) -> Counts:
    positions = source.num_rows * source.seq_len
    tally = LengthTally(source.seq_len)
    notes = []
    rows = source.num_rows
    if source.full_rows:
        tally.add(np.array([source.seq_len]), times=rows)
    else:
        rows = rows if scan else min(rows, max(1, MAX_FILLED_TOKENS // source.seq_len))
        for filled in _fill_rows(source, epoch, rows, track):
            tally.add(np.concatenate(filled.segment_lengths))
    lengths, exact = tally.lengths(), rows == source.num_rows
    if not exact:
        notes.append(f"document lengths are those of the first {rows:,} rows; --scan makes all")
    return Counts(
        epoch=epoch,
        rows=source.num_rows,
        tokens=positions,
        left_out_tokens=0,
        positions=positions,
        padding_tokens=0,
        loss_tokens=positions,
        documents=lengths.counted if exact else None,
        lengths=lengths,
        exact_lengths=exact,
        notes=notes,
    )


def _count_chats(source: ChatSource, epoch: int) -> Counts:
    """Exact for every epoch, from the plan: all epochs have the same rows by lengths."""
    chats, tally = source.counts, LengthTally(source.seq_len)
    tally.add(source.lengths)
    return Counts(
        epoch=epoch,
        rows=source.num_rows,
        tokens=chats.tokens,
        left_out_tokens=0,
        positions=source.num_rows * source.seq_len,
        padding_tokens=chats.padding_tokens,
        loss_tokens=chats.loss_tokens,
        documents=chats.samples,
        truncated=0 if chats.truncated is None else chats.truncated.count,
        dropped=sum(drop.count for drop in chats.dropped.values()),
        lengths=tally.lengths(),
        exact_lengths=True,
        notes=[],
        chats=chats,
    )


def _count_rows(source: RowSource, epoch: int, scan: bool, track: Track) -> Counts:
    """Any other source, by its rows alone."""
    rows = source.num_rows if scan else min(source.num_rows, max(1, MAX_FILLED_TOKENS // source.seq_len))
    tally = LengthTally(source.seq_len)
    padding = loss = 0
    for filled in _fill_rows(source, epoch, rows, track):
        padding += int(filled.num_padding.sum())
        loss += int((filled.labels != IGNORE_INDEX).sum())
        for lengths, padded in zip(filled.segment_lengths, filled.num_padding > 0, strict=True):
            tally.add(lengths[:-1] if padded else lengths)
    lengths, exact = tally.lengths(), rows == source.num_rows
    positions = source.num_rows * source.seq_len
    return Counts(
        epoch=epoch,
        rows=source.num_rows,
        tokens=positions - padding if exact else None,
        left_out_tokens=0,
        positions=positions,
        padding_tokens=padding if exact else None,
        loss_tokens=loss if exact else None,
        documents=lengths.counted if exact else None,
        lengths=lengths,
        exact_lengths=exact,
        notes=[] if exact else [f"counted are only the first {rows:,} rows; --scan makes all"],
    )


def _fill_rows(source: RowSource, epoch: int, rows: int, track: Track) -> Iterator[Rows]:
    """The first rows of an epoch, some at a time."""
    at_once = max(1, (1 << 18) // source.seq_len)
    for low in range(0, rows, at_once):
        indices = np.arange(low, min(low + at_once, rows))
        buffers = Rows.empty(len(indices), source.seq_len)
        source.fill(epoch, indices, buffers)
        yield buffers
        track("rows", int(indices[-1]) + 1, rows)


class LengthTally:
    """Adds lengths up to `Lengths`."""

    def __init__(self, seq_len: int) -> None:
        self._seq_len = seq_len
        self._counted = self._longest = self._total = self._longer = 0
        self._bins = np.zeros(_MAX_BINS, np.int64)

    def add(self, lengths: np.ndarray, *, times: int = 1) -> None:
        """Args:
        lengths: (n,) integers; those that are 0 are passed over.
        times: how often each of them occurs.
        """
        lengths = lengths[lengths > 0]
        if not lengths.size:
            return
        self._counted += lengths.size * times
        self._longest = max(self._longest, int(lengths.max()))
        self._total += int(lengths.sum()) * times
        self._longer += int((lengths > self._seq_len).sum()) * times
        # The exponent of frexp is exact: no document has 2^53 tokens.
        exponents = np.frexp(lengths.astype(np.float64))[1] - 1
        self._bins += np.bincount(exponents, minlength=_MAX_BINS) * times

    def lengths(self) -> Lengths:
        used = int(np.flatnonzero(self._bins)[-1]) + 1 if self._counted else 0
        return Lengths(
            counted=self._counted,
            longest=self._longest,
            total=self._total,
            longer_than_row=self._longer,
            bins=self._bins[:used].tolist(),
        )
