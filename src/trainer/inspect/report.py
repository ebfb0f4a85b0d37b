"""Counts for people, and everything as one JSON document."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from configs.safe_text import one_line
from trainer.data.chat.counts import ChatCounts, reasons
from trainer.inspect.chats import DroppedRow
from trainer.inspect.counts import Counts, Lengths
from trainer.inspect.findings import Findings
from trainer.inspect.render import row_states
from trainer.inspect.rows import ShownRow
from trainer.inspect.token_text import TokenText

if TYPE_CHECKING:
    from trainer.preflight import Plan

_BAR_WIDTH = 40


def render_counts(counts: Counts) -> Iterator[str]:
    """The lines to print."""
    yield f"counts of epoch {counts.epoch}"
    yield _line("rows", f"{counts.rows:,}")
    tokens = "not counted" if counts.tokens is None else f"{counts.tokens:,}"
    left_out = f", {counts.left_out_tokens:,} of them left out of this epoch" if counts.chats is None else ""
    yield _line("tokens", tokens + left_out)
    yield _line("tokens with loss", _share(counts.loss_tokens, counts.positions))
    yield _line("padding", _share(counts.padding_tokens, counts.positions))
    if counts.chats is None:
        yield _line("truncated", f"{counts.truncated:,} samples")
        yield _line("dropped", f"{counts.dropped:,} samples")
        yield _line("documents", "not counted" if counts.documents is None else f"{counts.documents:,}")
    else:
        yield from _chat_lines(counts.chats, counts.dropped)
    if counts.lengths is not None and counts.lengths.counted:
        yield from _length_lines(counts, counts.lengths)
    for note in counts.notes:
        yield f"note: {one_line(note)}"


def _chat_lines(chats: ChatCounts, dropped: int) -> Iterator[str]:
    yield _line("conversations", f"{chats.rows:,} in the data")
    yield _line("samples", f"{chats.samples:,} in an epoch")
    if chats.not_drawn:
        yield _line("not drawn", f"{chats.not_drawn:,} samples, by data.probabilities")
    cut_off = "" if chats.truncated is None else f", {chats.cut_tokens:,} tokens cut off"
    truncated, split = (drop.text("samples") if drop else "0 samples" for drop in (chats.truncated, chats.split))
    yield _line("truncated", f"{truncated}{cut_off}")
    left_out = f", {chats.pieces_left_out:,} parts without loss left out" if chats.pieces_left_out else ""
    yield _line("split", f"{split}{left_out}")
    yield _line("dropped", f"{dropped:,} conversations")
    for reason in reasons(chats.dropped):
        yield f"    {one_line(reason)}"
    yield _line("control tokens", f"{chats.split_control_tokens:,} spelled by messages, read as ordinary text")


def _length_lines(counts: Counts, lengths: Lengths) -> Iterator[str]:
    document = "document" if counts.chats is None else "sample"
    place = "" if counts.chats is None else f" ({one_line(counts.chats.longest_place)})"
    of = "" if counts.exact_lengths else f" of {lengths.counted:,} looked at"
    yield _line(
        f"longest {document}", f"{lengths.longest:,} tokens{place}; mean {lengths.total / lengths.counted:,.1f}{of}"
    )
    yield _line("longer than a row", f"{lengths.longer_than_row:,} {document}s{of}")
    yield f"  {document} lengths (tokens){of}"
    yield from _histogram(lengths)


def render_dropped(dropped: list[DroppedRow]) -> Iterator[str]:
    """The lines to print."""
    if dropped:
        yield ""
        yield "dropped conversations"
    for row in dropped:
        yield f"  {one_line(row.place)}: {one_line(row.reason)}"


def render_plan(plan: "Plan") -> str:
    total = plan.steps * plan.tokens_per_step
    return (
        f"plan: {plan.steps:,} steps of {plan.rows_per_step:,} rows ({plan.tokens_per_step:,} tokens), "
        f"{total:,} tokens in all, {plan.epochs:.4g} epochs"
    )


def document(findings: Findings, texts: TokenText) -> dict[str, Any]:
    """All that is shown, for `json.dumps`."""
    selection, plan, counts = findings.selection, findings.plan, findings.counts
    return {
        "data": findings.source.description,
        "template": findings.template,
        "seq_len": findings.source.seq_len,
        "step": selection.step,
        "digest": selection.digest,
        "rows": [_row(row, texts) for row in selection.rows],
        "counts": None if counts is None else _counts(counts),
        "dropped": [asdict(row) for row in findings.dropped],
        "plan": None
        if plan is None
        else {
            "steps": plan.steps,
            "epochs": plan.epochs,
            "rows_per_step": plan.rows_per_step,
            "tokens_per_step": plan.tokens_per_step,
        },
    }


def _row(row: ShownRow, texts: TokenText) -> dict[str, Any]:
    pieces: list[str] = []
    begin = 0
    segments = []
    for length in row.segment_lengths.tolist():
        here = texts.pieces(row.input_ids[begin : begin + length].tolist())
        segments.append("".join(here))
        pieces += here
        begin += length
    return {
        "place": row.place,
        "epoch": row.epoch,
        "index": row.index,
        "input_ids": row.input_ids.tolist(),
        "labels": row.labels.tolist(),
        "position_ids": row.position_ids.tolist(),
        "segment_lengths": row.segment_lengths.tolist(),
        "num_padding_tokens": row.num_padding,
        "num_loss_tokens": row.num_loss_tokens,
        "origins": [asdict(origin) for origin in row.origins],
        "states": [state.value for state in row_states(row)],
        "pieces": pieces,
        "segment_texts": segments,
        "text": "".join(segments),
    }


def _counts(counts: Counts) -> dict[str, Any]:
    values = asdict(counts)
    lengths = counts.lengths
    if lengths is not None:
        values["lengths"]["bins"] = [
            {"from": low, "to": high, "documents": number} for low, high, number in _bins(lengths)
        ]
    return values


def _bins(lengths: Lengths) -> list[tuple[int, int, int]]:
    """(least, greatest length, documents) from the first bin that holds any."""
    bins = [(1 << at, (2 << at) - 1, number) for at, number in enumerate(lengths.bins)]
    first = next((at for at, number in enumerate(lengths.bins) if number), 0)
    return bins[first:]


def _histogram(lengths: Lengths) -> Iterator[str]:
    bins = _bins(lengths)
    labels = [f"{low:,}" if low == high else f"{low:,}-{high:,}" for low, high, _ in bins]
    numbers = [f"{number:,}" for _, _, number in bins]
    most = max(number for _, _, number in bins)
    for label, number, (_, _, value) in zip(labels, numbers, bins, strict=True):
        bar = "#" * (-(-value * _BAR_WIDTH // most))
        yield f"  {label:>{max(map(len, labels))}}  {number:>{max(map(len, numbers))}}  {bar}".rstrip()


def _line(name: str, value: str) -> str:
    return f"  {name:<18} {value}"


def _share(number: int | None, of: int) -> str:
    return "not counted" if number is None else f"{number:,} ({100 * number / of:.4g} %)"
