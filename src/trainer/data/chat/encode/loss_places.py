"""Which tokens carry loss: those that stand for any of the text that does."""

import unicodedata

import numpy as np

from trainer.data.chat.sample import Rendered
from trainer.data.errors import DataError


def loss_by_bytes(ends: np.ndarray, rendered: Rendered, num_bytes: int) -> np.ndarray:
    """For tokens whose bytes add up to the text.

    Args:
        ends: (tokens,) int64: where each token's bytes end.
        num_bytes: of the text in UTF-8.

    Returns:
        (tokens,) bool
    """
    loss = np.zeros(ends.size, bool)
    spans = _spans(rendered)
    if not spans.size:
        return loss
    if num_bytes != len(rendered.text):
        spans = _bytes_before(rendered.text, spans)
    # From the token that holds a span's first byte to that which holds its last.
    first = np.searchsorted(ends, spans[:, 0], "right")
    last = np.searchsorted(ends, spans[:, 1] - 1, "right")
    for begin, end in zip(first.tolist(), last.tolist(), strict=True):
        loss[begin : end + 1] = True
    loss[:1] = False
    return loss


def _spans(rendered: Rendered) -> np.ndarray:
    """(spans, 2) int64: those that hold text."""
    return np.array([span for span in rendered.loss_spans if span[0] < span[1]], np.int64).reshape(-1, 2)


def _bytes_before(text: str, places: np.ndarray) -> np.ndarray:
    """How many bytes come before places in the text, which ascend."""
    flat = places.ravel().tolist()
    pieces = [text[begin:end] for begin, end in zip([0, *flat], flat, strict=False)]
    return np.cumsum([len(piece.encode()) for piece in pieces]).reshape(places.shape)


def loss_by_offsets(starts: np.ndarray, ends: np.ndarray, rendered: Rendered) -> np.ndarray:
    """For tokens whose places the tokenizer says.

    Args:
        starts, ends: (tokens,) int64 places of the tokens' text.

    Returns:
        (tokens,) bool

    Raises:
        DataError: the places are not in order.
    """
    spans = _spans(rendered)
    if not spans.size or not starts.size:
        return np.zeros(starts.size, bool)
    if (starts[1:] < starts[:-1]).any() or (ends[1:] < ends[:-1]).any():
        raise DataError("the tokenizer does not say which text its tokens come from, so loss cannot be placed")
    loss = _meets(starts, ends, spans)
    # A composed character has the place of its first part alone.
    follow = np.append(starts, len(rendered.text))[np.searchsorted(starts, starts, "right")]
    if (follow > ends).any():
        for token in np.flatnonzero(_meets(starts, np.maximum(ends, follow), spans) & ~loss):
            end = ends[token]
            loss[token] = _composes(rendered.text[end - 1 : end], rendered.text[end : follow[token]])
    loss[0] = False
    return loss


def _meets(starts: np.ndarray, ends: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Which tokens share a character with a span. One without text, as the marker of a word's start may be, counts as
    the character after it."""
    first = np.searchsorted(spans[:, 1], starts, "right")
    begin = np.append(spans[:, 0], np.iinfo(np.int64).max)[first]
    return begin < np.maximum(ends, starts + 1)


def _composes(letter: str, more: str) -> bool:
    """Unicode's normal form makes one character of a letter and what follows it."""
    return len(unicodedata.normalize("NFC", letter + more)) < len(letter + more)
