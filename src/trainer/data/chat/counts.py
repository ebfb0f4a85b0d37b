"""What conversations hold, what of it an epoch reads, and what is left out and why: none of it is lost silently."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from trainer.data.drops import Drop


@dataclass(frozen=True, kw_only=True)
class ChatCounts:
    """Of all parts together."""

    rows: int
    """Conversations of the data, unusable ones included."""

    dropped: dict[str, Drop]
    """Conversations that give no sample, by reason."""

    samples: int
    """Of an epoch; one that the mixture draws twice counts twice."""

    not_drawn: int
    """Samples that the mixture leaves out of every epoch."""

    tokens: int
    """Of an epoch, without padding."""

    loss_tokens: int
    """Of an epoch: positions with a label."""

    padding_tokens: int
    """Of an epoch."""

    truncated: Drop | None
    """Samples cut to the length of a row."""

    split: Drop | None
    """Samples cut into several pieces."""

    pieces_left_out: int
    """Pieces of split samples that carry no loss."""

    cut_tokens: int
    """Tokens that truncation cuts off, and those of pieces that are left out."""

    split_control_tokens: int
    """Places where the text of a message spells a control token; they are ordinary text."""

    longest: int
    """Tokens of the longest sample, before it is cut."""

    longest_place: str
    """Where it is."""

    @property
    def padding_share(self) -> float:
        """Padding in all positions of an epoch."""
        return self.padding_tokens / (self.tokens + self.padding_tokens)

    def text(self) -> str:
        """All of it in one line."""
        phrases = [
            f"{self.samples:,} samples of {self.rows:,} conversations: {self.tokens:,} tokens, {self.loss_tokens:,} "
            f"with loss, {self.padding_share:.2%} padding"
        ]
        if self.truncated is not None:
            phrases.append(f"{self._long(self.truncated)} truncated, {self.cut_tokens:,} tokens cut off")
        if self.split is not None:
            left_out = f", {self.pieces_left_out:,} pieces without loss left out ({self.cut_tokens:,} tokens)"
            phrases.append(f"{self._long(self.split)} split{left_out * (self.pieces_left_out > 0)}")
        if self.dropped:
            phrases.append(f"left out: {', '.join(reasons(self.dropped))}")
        if self.not_drawn:
            phrases.append(f"{self.not_drawn:,} samples not drawn by the mixture")
        if self.split_control_tokens:
            phrases.append(f"{self.split_control_tokens:,} control tokens spelt by messages are ordinary text")
        return "; ".join(phrases)

    def _long(self, drop: Drop) -> str:
        return f"{drop.count:,} ({drop.count / self.rows:.1%}, {drop.where})"


def merge_drops(all_drops: Iterable[Mapping[str, Drop]]) -> dict[str, Drop]:
    """Counts by reason added up; the first place is that of the first who has the reason."""
    merged: dict[str, Drop] = {}
    for drops in all_drops:
        for reason, drop in drops.items():
            before = merged.get(reason)
            merged[reason] = drop if before is None else replace(before, count=before.count + drop.count)
    return merged


def reasons(drops: Mapping[str, Drop]) -> list[str]:
    """`3 no messages (first: a.jsonl, line 4)`, `1 empty answer (a.jsonl, line 9)`, the most frequent first."""
    ordered = sorted(drops.items(), key=lambda item: (-item[1].count, item[0]))
    return [drop.text(reason) for reason, drop in ordered]
