"""The bytes that the tokens of a byte-level tokenizer stand for.

Where they add up to the text itself, they say what each token stands for: exactly, whatever the tokenizer does, and
sooner than the tokenizers library does. Where they don't, because the text was normalised or a token strips spaces,
its offsets do.
"""

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.tokenizer import byte_letters

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NORMALIZERS = (None, "NFC")
"""Those that leave most texts as they are."""


class ByteTokens:
    """The tokens of a vocabulary as bytes."""

    def __init__(self, table: list[bytes]) -> None:
        """
        Args:
            table: bytes by id.
        """
        self._table = table
        self._lengths = np.array([len(token) for token in table], np.int64)

    def ends(self, ids: list[int], raw: bytes) -> np.ndarray | None:
        """Where in `raw` each token ends, (tokens,) int64; None where the tokens are not exactly these bytes."""
        table = self._table
        if b"".join([table[number] for number in ids]) != raw:
            return None
        return self._lengths[ids].cumsum()


def byte_tokens(backend: "Tokenizer") -> ByteTokens | None:
    """Those of a tokenizer; None where it is not byte-level or changes most texts before it looks at them."""
    description = json.loads(backend.to_str())
    normalizer = description["normalizer"]
    if (normalizer and normalizer["type"]) not in _NORMALIZERS or not _is_byte_level(description["pre_tokenizer"]):
        return None
    letters = byte_letters()
    added = {number: token.content for number, token in backend.get_added_tokens_decoder().items()}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, number in vocabulary.items():
        if number not in added:
            table[number] = bytes(letters[letter] for letter in token) if letters.keys() >= set(token) else b""
    for number, content in added.items():
        table[number] = content.encode()
    return ByteTokens(table)


def _is_byte_level(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    return any(part["type"] == "ByteLevel" for part in pre_tokenizer.get("pretokenizers", [pre_tokenizer]))
