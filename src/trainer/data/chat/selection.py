"""From the samples of all parts to the pieces of an epoch: cut to the length of a row, mixed, counted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from configs.data import Overflow, Packing, StoppingStrategy
from configs.errors import ConfigError
from trainer.data.chat.cache.cache import SampleCache
from trainer.data.chat.counts import ChatCounts, merge_drops, reasons
from trainer.data.chat.mixture import mix
from trainer.data.chat.overflow import Cut, cut
from trainer.data.chat.plan import RowPlan
from trainer.data.chat.read.parts import Part
from trainer.data.drops import Drop


@dataclass(frozen=True, kw_only=True)
class CachedPart:
    """One part of the data and its tokenised conversations."""

    part: Part
    samples: SampleCache

    def place(self, sample: int) -> str:
        """Where a sample comes from, for messages."""
        return self.part.place(int(self.samples.rows[sample]))


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """How samples become rows."""

    seq_len: int
    packing: Packing
    overflow: Overflow
    seed: int
    shuffle: bool
    probabilities: list[float] | None
    stopping_strategy: StoppingStrategy
    padding_id: int
    """Token of the padding. It carries no loss, and no other token sees it."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What an epoch reads."""

    pieces: np.ndarray
    """(n,) overflow.PIECE in the order of the mixture; samples are numbered through all parts."""

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
    records = [part.samples.record for part in parts]
    num_rows = sum(record.num_rows for record in records)
    dropped = merge_drops(record.dropped for record in records)
    lost = _as_drop(parts, (found.lost for found in cuts))
    if lost is not None:
        dropped[lost_reason(options.overflow, options.seq_len)] = lost
    pieces = np.concatenate([found.pieces for found in cuts])
    if not len(pieces):
        why = ", ".join(reasons(dropped)) or "there are none"
        raise ConfigError.one(f"{key}.name", f"0 supervised tokens in {num_rows:,} conversations: {why}")
    loss_tokens = np.concatenate([found.loss_tokens for found in cuts])
    starts = offsets([record.num_samples for record in records])
    pieces["sample"] += np.repeat(starts[:-1], [len(found.pieces) for found in cuts]).astype(np.uint32)
    sizes = [record.num_samples - len(found.lost) for record, found in zip(records, cuts, strict=True)]
    num_samples, not_drawn = sum(sizes), 0
    if options.probabilities is not None:
        mixed = mix(
            sizes,
            probabilities=options.probabilities,
            stopping_strategy=options.stopping_strategy,
            seed=options.seed,
        )
        drawn = offsets(sizes)[mixed[:, 0]] + mixed[:, 1]
        num_samples, not_drawn = len(drawn), num_samples - len(np.unique(drawn))
        order = _pieces_of(drawn, pieces)
        pieces, loss_tokens = pieces[order], loss_tokens[order]
    plan = RowPlan(
        pieces["length"], seq_len=options.seq_len, packing=options.packing, seed=options.seed, shuffle=options.shuffle
    )
    tokens = int(pieces["length"].sum(dtype=np.int64))
    kept_long = _as_drop(parts, (found.kept_long for found in cuts))
    longest = max(records, key=lambda record: record.longest)
    counts = ChatCounts(
        rows=num_rows,
        dropped=dropped,
        samples=num_samples,
        not_drawn=not_drawn,
        tokens=tokens,
        loss_tokens=int(loss_tokens.sum()),
        padding_tokens=plan.num_rows * options.seq_len - tokens,
        truncated=kept_long if options.overflow == "truncate" else None,
        split=kept_long if options.overflow == "split" else None,
        pieces_left_out=sum(found.num_left_out for found in cuts),
        cut_tokens=sum(found.cut_tokens for found in cuts),
        split_control_tokens=sum(record.split_control_tokens for record in records),
        longest=longest.longest,
        longest_place=longest.longest_place,
    )
    return Selection(pieces=pieces, plan=plan, counts=counts)


def offsets(sizes: Sequence[int]) -> np.ndarray:
    """(parts + 1,) int64: samples are numbered through all parts; those of part p begin at offset p."""
    return np.cumsum([0, *sizes], dtype=np.int64)


def lost_reason(overflow: Overflow, seq_len: int) -> str:
    """What samples without a piece are counted under."""
    if overflow == "drop":
        return f"longer than seq_len = {seq_len}"
    return f"no loss token in the first seq_len = {seq_len} tokens"


def _pieces_of(drawn: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """The mixture draws samples that have a piece, and a sample brings all of its pieces: their numbers."""
    _, firsts, counts = np.unique(pieces["sample"], return_index=True, return_counts=True)
    firsts, counts = firsts[drawn], counts[drawn]
    stops = np.cumsum(counts)
    return np.arange(stops[-1]) + np.repeat(firsts - (stops - counts), counts)


def _refuse_long(parts: Sequence[CachedPart], cuts: list[Cut], seq_len: int, key: str) -> None:
    for part, found in zip(parts, cuts, strict=True):
        if len(found.too_long):
            first = int(found.too_long[0])
            number = sum(len(found.too_long) for found in cuts)
            raise ConfigError.one(
                f"{key}.overflow",
                f'"error": {part.place(first)} has {int(part.samples.lengths[first]):,} tokens, more than seq_len = '
                f"{seq_len}, as have {number:,} conversations in all; raise {key}.seq_len or choose another overflow",
            )


def _as_drop(parts: Sequence[CachedPart], samples: Iterable[np.ndarray]) -> Drop | None:
    """Samples of each part as one count; None where there are none."""
    found = [(part, numbers) for part, numbers in zip(parts, samples, strict=True) if len(numbers)]
    if not found:
        return None
    part, numbers = found[0]
    return Drop(count=sum(len(numbers) for _, numbers in found), first_place=part.place(int(numbers[0])))
