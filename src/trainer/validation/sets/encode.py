"""Rows of text to sequences of tokens, some at a time.

A document with a context is cut as lm-evaluation-harness cuts it: white space at the end of the context goes to the
continuation, both are tokenised as one text, and as many tokens as the context alone makes are its context.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.errors import DataError, PlacedError
from trainer.validation.sets.kinds import Kind, TextDocument, read_document
from trainer.validation.sets.text_encoder import TextEncoder

if TYPE_CHECKING:
    from trainer.data.tables.file_part import FilePart

EMPTY = "a text is empty"
NOTHING_SCORED = "no token stands for the continuation alone"
"""Reasons to leave a document out."""

CHANGED = "changed"
"""The tokenizer changed a text before it looked at it."""
BORDER = "border"
"""A token stands for the end of the context and the beginning of the continuation."""

SEQUENCE = np.dtype(
    [
        ("end", "<i8"),  # one past its last token, in the stream of all of them
        ("document", "<i8"),  # its row
        ("num_context", "<i4"),  # so many of its first tokens are not scored
        ("num_bytes", "<i4"),  # of the option as it was given, in UTF-8
        ("first", "<i4"),  # the first option of its document with the same tokens, from 0
        ("leading_space", "u1"),  # 1: its first token spells a space that is not in the text
        ("right", "u1"),  # 1: the right option
    ]
)

_BATCH_CHARS = 2**20
"""Text encoded at once. An encoding takes some hundred bytes per token."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What became of some consecutive rows."""

    num_rows: int

    ids: np.ndarray
    """(tokens,) int32: all sequences, one after the other."""

    sequences: np.ndarray
    """(sequences,) SEQUENCE: one per option, those of a document together; `end` counts from the start of the chunk."""

    left_out: list[tuple[int, str]]
    """Rows without sequences, ascending, and the reasons."""

    noted: list[tuple[int, str]]
    """Rows of which something is to be told, CHANGED or BORDER."""


@dataclass(kw_only=True)
class _Batch:
    """Rows to be encoded together."""

    num_rows: int = 0
    documents: list[tuple[int, TextDocument, int]] = field(default_factory=list)
    """Row, what it says, and how many of the texts are its own."""
    texts: list[str] = field(default_factory=list)
    """Per document its context, where it has one, and that with each option."""

    left_out: list[tuple[int, str]] = field(default_factory=list)


class RowEncoder:
    """Encodes the first rows of a part."""

    def __init__(self, part: "FilePart", kind: Kind, encoder: TextEncoder) -> None:
        self._part = part
        self._kind: Kind = kind
        self._encoder = encoder

    def chunks(self, num_rows: int) -> Iterator[Chunk]:
        """The rows up to number `num_rows`, in their order.

        Raises:
            PlacedError: about the first row that cannot be used.
        """
        return map(self._encode, self._batches(num_rows))

    def _batches(self, num_rows: int) -> Iterator[_Batch]:
        batch, chars, row = _Batch(), 0, 0
        try:
            for row, raw in enumerate(self._part.rows(0, num_rows)):
                chars += self._add(batch, row, raw)
                if chars >= _BATCH_CHARS:
                    yield batch
                    batch, chars = _Batch(), 0
        except DataError as error:
            # Rows before it come first, whichever step they fail in.
            yield batch
            raise (error if isinstance(error, PlacedError) else self._placed(row, error)) from error
        yield batch

    def _add(self, batch: _Batch, row: int, raw: dict[str, object]) -> int:
        """Put a row into a batch; gives the characters that it adds."""
        batch.num_rows += 1
        document = read_document(self._kind, raw)
        if not all(document.options):
            batch.left_out.append((row, EMPTY))
            return 0
        texts = [document.context + option for option in document.options]
        context = document.context.rstrip()
        if context:
            texts.insert(0, context)
        batch.documents.append((row, document, len(texts)))
        batch.texts += texts
        return sum(map(len, texts))

    def _placed(self, row: int, error: DataError) -> PlacedError:
        return PlacedError(f"{self._part.place(row)}: {error}")

    def _encode(self, batch: _Batch) -> Chunk:
        growing = _Growing(num_rows=batch.num_rows, left_out=batch.left_out)
        try:
            encodings = self._encoder.encode(batch.texts)
        except DataError:
            encodings = None  # one document after the other, to see which it is
        start = 0
        for row, document, count in batch.documents:
            own = slice(start, start + count)
            start += count
            texts = batch.texts[own]
            try:
                ids = self._encoder.encode(texts) if encodings is None else encodings[own]
                self._add_document(growing, row, document, texts, ids)
            except DataError as error:
                raise self._placed(row, error) from error
        return growing.finish()

    def _add_document(
        self, growing: "_Growing", row: int, document: TextDocument, texts: list[str], ids: list[list[int]]
    ) -> None:
        """Args:
        texts, ids: as in _Batch.
        """
        num_options = len(document.options)
        context_ids = ids[0] if len(ids) > num_options else []
        num_context = len(context_ids)
        if min(map(len, ids[-num_options:])) <= num_context:
            growing.left_out.append((row, NOTHING_SCORED))
            return
        changed = border = False
        option_ids = ids[-num_options:]
        options = zip(document.options, texts[-num_options:], option_ids, strict=True)
        for number, (option, text, own) in enumerate(options):
            leading_space, own_changed = self._encoder.compare(text, own)
            changed |= own_changed
            border |= own[:num_context] != context_ids
            first, right = option_ids.index(own), number == document.right
            growing.add(own, (row, num_context, len(option.encode()), first, leading_space, right))
        growing.noted += [(row, what) for what, holds in ((CHANGED, changed), (BORDER, border)) if holds]


@dataclass(kw_only=True)
class _Growing:
    """A chunk in the making."""

    num_rows: int
    left_out: list[tuple[int, str]]
    noted: list[tuple[int, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    sequences: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, ids: list[int], rest: tuple[int, ...]) -> None:
        """Args:
        rest: the fields of SEQUENCE but `end`.
        """
        self.ids += ids
        self.sequences.append((len(self.ids), *rest))

    def finish(self) -> Chunk:
        return Chunk(
            num_rows=self.num_rows,
            ids=np.array(self.ids, np.int32),
            sequences=np.array(self.sequences, SEQUENCE),
            left_out=sorted(self.left_out),
            noted=self.noted,
        )
