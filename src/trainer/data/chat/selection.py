"""From the samples of all parts to the pieces of an epoch: cut to the length of a row, mixed, counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from configs.errors import ConfigError
from trainer.data.chat.cache.cache import SampleCache
from trainer.data.chat.cache.record import Drop
from trainer.data.chat.counts import ChatCounts, merge_drops, reasons_text
from trainer.data.chat.mixture import mix
from trainer.data.chat.overflow import Cut, Overflow, cut
from trainer.data.chat.plan import Packing, RowPlan
from trainer.data.chat.read.parts import Part


@dataclass(frozen=True, kw_only=True)
class CachedPart:
    """One part of the data and its tokenised conversations."""

    part: Part
    samples: SampleCache


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """How samples become rows."""

    seq_len: int
    packing: Packing
    overflow: Overflow
    seed: int
    shuffle: bool
    probabilities: list[float] | None
    stopping_strategy: Literal["first_exhausted", "all_exhausted"]
    padding_id: int
    """Token of the padding. It carries no loss, and no other token sees it."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The pieces of an epoch, in the order of the mixture, and the plan of their rows."""

    samples: np.ndarray
    """(n,) int32 (int64 from 2^31 samples on): sample of each piece, numbered through all parts."""

    starts: np.ndarray
    """(n,) int32: its first token."""

    lengths: np.ndarray
    """(n,) int32: its tokens."""

    plan: RowPlan
    counts: ChatCounts


def select(parts: Sequence[CachedPart], options: RowOptions, *, key: str) -> Selection:
    """What an epoch reads.

    Args:
        parts: in the order of the config.
        key: the table of the config that is spoken of, `data` or `val.data`.

    Raises:
        ConfigError: nothing is left to train on, or a sample is longer than a row under "error".
    """
    cuts = [cut(part.samples, seq_len=options.seq_len, overflow=options.overflow) for part in parts]
    if options.overflow == "error":
        _refuse_long(parts, cuts, options.seq_len, key)
    dropped = _dropped(parts, cuts, options)
    if not any(len(found.pieces.samples) for found in cuts):
        num_rows = sum(part.samples.counts.rows for part in parts)
        why = reasons_text(dropped) if dropped else "there are none"
        raise ConfigError.one(f"{key}.name", f"0 supervised tokens in {num_rows:,} conversations: {why}")
    sizes = [part.samples.num_samples for part in parts]
    drawn = _draw(cuts, options)
    samples = np.concatenate([found.pieces.samples + start for found, start in zip(cuts, offsets(sizes), strict=False)])
    losses = np.concatenate([found.pieces.loss_tokens for found in cuts])
    lengths = np.concatenate([found.pieces.lengths for found in cuts])[drawn.pieces]
    plan = RowPlan(
        lengths, seq_len=options.seq_len, packing=options.packing, seed=options.seed, shuffle=options.shuffle
    )
    tokens = int(lengths.sum(dtype=np.int64))
    counts = ChatCounts(
        rows=sum(part.samples.counts.rows for part in parts),
        dropped=dropped,
        samples=drawn.num_samples,
        not_drawn=drawn.num_left_out,
        tokens=tokens,
        loss_tokens=int(losses[drawn.pieces].sum(dtype=np.int64)),
        padding_tokens=plan.num_rows * options.seq_len - tokens,
        truncated=_cut_samples(parts, cuts) if options.overflow == "truncate" else None,
        split=_cut_samples(parts, cuts) if options.overflow == "split" else None,
        pieces_left_out=sum(found.num_left_out for found in cuts),
        cut_tokens=sum(found.cut_tokens for found in cuts),
        split_control_tokens=sum(part.samples.counts.split_control_tokens for part in parts),
        **_longest(parts),
    )
    return Selection(
        samples=samples.astype(np.int32 if sum(sizes) < 1 << 31 else np.int64)[drawn.pieces],
        starts=np.concatenate([found.pieces.starts for found in cuts])[drawn.pieces],
        lengths=lengths,
        plan=plan,
        counts=counts,
    )


def offsets(sizes: Sequence[int]) -> np.ndarray:
    """(parts + 1,) int64: samples are numbered through all parts; those of part p begin at offset p."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    pieces: np.ndarray | slice
    """Of the pieces of all parts, one after the other, those of an epoch."""

    num_samples: int
    num_left_out: int


def _draw(cuts: list[Cut], options: RowOptions) -> _Drawn:
    """The mixture: it draws samples that have something to train on, and a sample brings all its pieces."""
    if options.probabilities is None:
        return _Drawn(pieces=slice(None), num_samples=sum(found.num_kept for found in cuts), num_left_out=0)
    firsts, counts = [], []
    begin = 0
    for found in cuts:
        _, first, count = np.unique(found.pieces.samples, return_index=True, return_counts=True)
        firsts.append(first + begin)
        counts.append(count)
        begin += len(found.pieces.samples)
    sizes = [len(first) for first in firsts]
    mixed = mix(
        sizes,
        probabilities=options.probabilities,
        stopping_strategy=options.stopping_strategy,
        seed=options.seed,
    )
    drawn = offsets(sizes)[mixed[:, 0]] + mixed[:, 1]
    first, count = np.concatenate(firsts)[drawn], np.concatenate(counts)[drawn]
    stops = np.cumsum(count)
    return _Drawn(
        pieces=np.arange(stops[-1]) + np.repeat(first - (stops - count), count),
        num_samples=len(drawn),
        num_left_out=sum(sizes) - len(np.unique(drawn)),
    )


def _refuse_long(parts: Sequence[CachedPart], cuts: list[Cut], seq_len: int, key: str) -> None:
    for part, found in zip(parts, cuts, strict=True):
        if len(found.too_long):
            first = int(found.too_long[0])
            number = sum(len(found.too_long) for found in cuts)
            raise ConfigError.one(
                f"{key}.overflow",
                f'"error": {_place(part, first)} has {int(part.samples.lengths[first]):,} tokens, more than seq_len = '
                f"{seq_len}, as have {number:,} conversations in all; raise {key}.seq_len or choose another overflow",
            )


def _dropped(parts: Sequence[CachedPart], cuts: list[Cut], options: RowOptions) -> dict[str, Drop]:
    """Conversations that give nothing, by reason: those of the caches, and those that do not fit into a row."""
    drops = [part.samples.counts.dropped for part in parts]
    reason = lost_reason(options.overflow, options.seq_len)
    for part, found in zip(parts, cuts, strict=True):
        if len(found.lost):
            drops.append({reason: _drop(part, found.lost)})
    return merge_drops(drops)


def lost_reason(overflow: Overflow, seq_len: int) -> str:
    """What samples without a piece are counted under."""
    if overflow == "drop":
        return f"longer than seq_len = {seq_len}"
    return f"no loss token in the first seq_len = {seq_len} tokens"


def _cut_samples(parts: Sequence[CachedPart], cuts: list[Cut]) -> Drop | None:
    """Samples longer than a row that go on, shorter."""
    found = [(part, cut.kept_long) for part, cut in zip(parts, cuts, strict=True) if len(cut.kept_long)]
    return merge_drops({"": _drop(part, numbers)} for part, numbers in found).get("")


def _drop(part: CachedPart, numbers: np.ndarray) -> Drop:
    return Drop(count=len(numbers), first_place=_place(part, int(numbers[0])))


def _place(part: CachedPart, number: int) -> str:
    return part.part.place(int(part.samples.rows[number]))


def _longest(parts: Sequence[CachedPart]) -> dict[str, Any]:
    counts = max((part.samples.counts for part in parts), key=lambda counts: counts.longest)
    return {"longest": counts.longest, "longest_place": counts.longest_place}
