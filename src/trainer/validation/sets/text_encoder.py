"""Ordinary text to tokens, and whether those spell it byte by byte.

Nothing is added to the tokens of the text, and text that spells a control token stays text.
"""

from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trainer.data.errors import DataError
from trainer.text import first_line
from trainer.tokenizer import control_ids, plain_copy
from trainer.validation.token_bytes import SPACE_MARK, byte_ids, is_panic, token_spellings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Library(Protocol):
    """What turns text into ids."""

    @property
    def digest(self) -> str:
        """Of all that decides about ids."""
        ...

    def encode(self, texts: list[str]) -> list[list[int]]: ...

    def normal(self, text: str) -> str:
        """The text that tokens are made of, without what is put before it."""
        ...


class TextEncoder:
    """A tokenizer for held-out text. It has one of its own: nothing that others set in theirs matters."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        # Copies and tables of a large vocabulary take a second, and there may be no text to encode.
        self._tokenizer = tokenizer

    @cached_property
    def _table(self) -> list[bytes]:
        return token_spellings(self._tokenizer)

    @cached_property
    def _library(self) -> _Library:
        ids = byte_ids(self._tokenizer)
        return _Fast(self._tokenizer) if ids is None else _Bytes(ids)

    @cached_property
    def digest(self) -> str:
        """Of all about it that changes ids, or what is said of them.

        Raises:
            ConfigError: it gives other tokens each time.
        """
        content = f"{self._library.digest} {sorted(control_ids(self._tokenizer))}"
        return blake2b(content.encode(), digest_size=16).hexdigest()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each.

        Raises:
            DataError: one of them cannot be tokenised.
        """
        try:
            return self._library.encode(texts)
        except BaseException as error:
            # tokenizers raises plain Exception; for a word without an unknown token, say.
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise DataError(f"cannot be tokenised: {first_line(error)}") from error

    def compare(self, text: str, ids: list[int]) -> tuple[bool, bool]:
        """Hold what its tokens spell against the text.

        Returns:
            whether they spell a space before it that is not in the text; whether they spell another text, that which
            the tokenizer's normaliser makes of it

        Raises:
            DataError: they leave out some of it, or one of them spells nothing: bits per byte would be too low.
        """
        raw = text.encode()
        spelled = b"".join(map(self._table.__getitem__, ids))
        if spelled == raw:
            return False, False
        if len(spelled) == len(raw) + 1 and spelled[:1] == b" " and spelled.endswith(raw):
            return True, False
        silent = next((id_ for id_ in ids if not self._table[id_]), None)
        if silent is not None:
            token = self._tokenizer.convert_ids_to_tokens(silent)
            raise DataError(f"holds text that the tokenizer turns into {token!r}, whose bytes cannot be counted")
        normal = self._library.normal(text).encode()
        if len(spelled) < len(normal):
            raise DataError(
                "holds text that the tokenizer leaves out: it has no token for it, so its bytes cannot be counted"
            )
        return spelled[:1] == b" " and (spelled[1:] == normal or normal[:1] != b" "), True


class _Fast:
    """A tokenizer of the tokenizers library."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        backend: Any = tokenizer.backend_tokenizer
        self._backend = plain_copy(backend)
        self._backend.encode_special_tokens = True
        self._marks_spaces = SPACE_MARK in self._backend.get_vocab()
        # Some put the space of their own before the text while they normalise it, others later.
        self._prepends = self._normalise("a") == " a"

    @property
    def digest(self) -> str:
        import tokenizers

        return f"{tokenizers.__version__} {self._backend.to_str()}"

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def normal(self, text: str) -> str:
        normal = self._normalise(text)
        return normal[1:] if self._prepends else normal

    def _normalise(self, text: str) -> str:
        normalizer = self._backend.normalizer
        normal = text if normalizer is None else normalizer.normalize_str(text)
        return normal.replace(SPACE_MARK, " ") if self._marks_spaces else normal


class _Bytes:
    """A tokenizer with a token for each byte and no other for text."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = np.array(ids, np.int64)

    @property
    def digest(self) -> str:
        return f"bytes {self._ids.tolist()}"

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [self._ids[np.frombuffer(text.encode(), np.uint8)].tolist() for text in texts]

    def normal(self, text: str) -> str:
        return text
