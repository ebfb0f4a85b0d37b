"""From rendered conversations to tokens, and from places in the text to the tokens that carry loss.

A token carries loss if any of the text it stands for does. What text that is comes from the tokenizer itself, without
its post-processor: with one, byte-level tokenizers report spaces as no text at all ("trim_offsets"). Tokens that stand
for bytes of one character all have that character's place.
"""

import re
import unicodedata
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.errors import ConfigError
from trainer.data.chat.literal_encoder import LiteralEncoder
from trainer.data.chat.sample import ChatError, Rendered, Sample
from trainer.text import first_line
from trainer.tokenizer import special_ids

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

_KEY = "tokenizer.name"
_SURROGATE = re.compile("[\ud800-\udfff]")


class Encoder:
    """Tokenises rendered conversations. It has a tokenizer of its own: nothing that others set in theirs matters."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """
        Raises:
            ConfigError: the tokenizer does not say where its tokens come from, or gives other tokens each time.
        """
        self._backend = _plain_backend(tokenizer)
        self._digest = blake2b(self._backend.to_str().encode(), digest_size=16).hexdigest()
        self._literal = LiteralEncoder(self._backend)
        self._template = tokenizer.chat_template
        self._special = {**special_ids(tokenizer), **tokenizer.special_tokens_map}

    @property
    def key(self) -> dict[str, Any]:
        """JSON-able: all about it that changes ids."""
        import tokenizers

        return {
            "tokenizer": self._digest,
            "template": self._template,
            "special": {name: str(value) for name, value in self._special.items()},
            "tokenizers": tokenizers.__version__,
        }

    def encode(self, rendered: list[Rendered]) -> list[Sample]:
        """Tokenise conversations. No token is added to those of the text.

        Raises:
            ChatError: one of them cannot be tokenised, or not so that its loss is exact.
        """
        texts = [one.text for one in rendered if not one.literal_spans]
        try:
            encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False))
        except Exception as error:  # tokenizers raises plain Exception, for a word without an unknown token for one
            raise ChatError(_describe(error, texts)) from error
        return [self._encode_literal(one) if one.literal_spans else _sample(next(encodings), one) for one in rendered]

    def _encode_literal(self, rendered: Rendered) -> Sample:
        try:
            ids, starts, ends = self._literal.encode(rendered.text, rendered.literal_spans)
        except ChatError:
            raise
        except Exception as error:
            raise ChatError(_describe(error, [rendered.text])) from error
        return Sample(input_ids=ids, loss=_loss(starts, ends, rendered))


def _plain_backend(tokenizer: "PreTrainedTokenizerBase") -> "Tokenizer":
    """A copy of the tokenizer's own that only tokenises: nothing is cut, padded or added, and no offset is trimmed."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        message = (
            f"{type(tokenizer).__name__} does not say which text its tokens come from, so loss cannot be placed; chats "
            'need a tokenizer of the tokenizers library (a "fast" one, with a tokenizer.json)'
        )
        raise ConfigError.one(_KEY, message)
    if getattr(tokenizer, "split_special_tokens", False):
        message = "the tokenizer has split_special_tokens set: its template's control tokens would be plain text"
        raise ConfigError.one(_KEY, message)
    try:
        copy = Tokenizer.from_str(backend.to_str())
    except Exception as error:  # a part written in Python
        raise ConfigError.one(_KEY, f"the tokenizer cannot be copied: {first_line(error)}") from error
    if getattr(copy.model, "dropout", None):
        raise ConfigError.one(_KEY, "the tokenizer has BPE dropout: it gives other tokens each time")
    copy.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
    copy.no_truncation()
    copy.no_padding()
    return copy


def _describe(error: Exception, texts: list[str]) -> str:
    if any(map(_SURROGATE.search, texts)):
        return "holds half of a character (a lone surrogate, \\ud800 to \\udfff), which is no text"
    return f"cannot be tokenised: {first_line(error)}"


def _sample(encoding: "Encoding", rendered: Rendered) -> Sample:
    ids = np.array(encoding.ids, np.int32)
    offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * ids.size)
    return Sample(input_ids=ids, loss=_loss(offsets[::2], offsets[1::2], rendered))


def _loss(starts: np.ndarray, ends: np.ndarray, rendered: Rendered) -> np.ndarray:
    """Which tokens carry loss.

    Args:
        starts, ends: (tokens,) int64 places of the tokens' text.

    Returns:
        (tokens,) bool

    Raises:
        ChatError: the places are not in order.
    """
    if not rendered.loss_spans or not starts.size:
        return np.zeros(starts.size, bool)
    if (starts[1:] < starts[:-1]).any() or (ends[1:] < ends[:-1]).any():
        raise ChatError("the tokenizer does not say which text its tokens come from, so loss cannot be placed")
    spans = np.array(rendered.loss_spans, np.int64)
    loss = _meets(starts, ends, spans)
    # A composed character has the place of its first part alone.
    follow = np.append(starts[1:], len(rendered.text))
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
