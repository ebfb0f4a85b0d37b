"""From rendered conversations to tokens, and from places in the text to the tokens that carry loss.

A token carries loss if any of the text it stands for does. What text that is, the bytes of the tokens say where they
add up to the text (`byte_tokens`), else the tokenizer's offsets, without its post-processor: with one, byte-level
tokenizers report spaces as no text at all ("trim_offsets"). Tokens that stand for bytes of one character all have that
character's place.
"""

import re
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.errors import ConfigError
from trainer.data.chat.encode.byte_tokens import ByteTokens, byte_tokens
from trainer.data.chat.encode.literal_encoder import LiteralEncoder
from trainer.data.chat.encode.loss_places import loss_by_bytes, loss_by_offsets
from trainer.data.chat.sample import Rendered, Sample
from trainer.data.errors import DataError
from trainer.text import first_line
from trainer.tokenizer import plain_copy, special_ids

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

    @cached_property
    def _bytes(self) -> ByteTokens | None:
        return byte_tokens(self._backend)

    def encode(self, rendered: list[Rendered]) -> list[Sample]:
        """Tokenise conversations. No token is added to those of the text.

        Raises:
            DataError: one of them cannot be tokenised, or not so that its loss is exact.
        """
        texts = [one.text for one in rendered if not one.literal_spans]
        try:
            if self._bytes is None:
                encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False))
            else:
                encodings = iter(self._backend.encode_batch_fast(texts, add_special_tokens=False))  # without offsets
            return [self._sample(one, None if one.literal_spans else next(encodings)) for one in rendered]
        except DataError:
            raise
        except Exception as error:  # tokenizers raises plain Exception, for a word without an unknown token for one
            raise DataError(_describe(error, [one.text for one in rendered])) from error

    def _sample(self, rendered: Rendered, encoding: "Encoding | None") -> Sample:
        if encoding is None:
            ids, starts, ends = self._literal.encode(rendered.text, rendered.literal_spans)
            return Sample(input_ids=ids, loss=loss_by_offsets(starts, ends, rendered))
        numbers = encoding.ids
        ids = np.array(numbers, np.int32)
        if self._bytes is not None:
            raw = rendered.text.encode()
            byte_ends = self._bytes.ends(numbers, raw)
            if byte_ends is not None:
                return Sample(input_ids=ids, loss=loss_by_bytes(byte_ends, rendered, len(raw)))
            encoding = self._backend.encode(rendered.text, add_special_tokens=False)
        offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * ids.size)
        return Sample(input_ids=ids, loss=loss_by_offsets(offsets[::2], offsets[1::2], rendered))


def _plain_backend(tokenizer: "PreTrainedTokenizerBase") -> "Tokenizer":
    """A plain copy of the tokenizer's own."""
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
    return plain_copy(backend)


def _describe(error: Exception, texts: list[str]) -> str:
    if any(map(_SURROGATE.search, texts)):
        return "holds half of a character (a lone surrogate, \\ud800 to \\udfff), which is no text"
    return f"cannot be tokenised: {first_line(error)}"
