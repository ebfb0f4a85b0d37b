"""Token ids as text, token by token: which piece of the text each token completes.

A token may hold part of a character. Its bytes are kept until another token completes the character, which then
belongs to that one; bytes that no token completes are shown as `\\xe2`. Decoding token by token would show U+FFFD.
"""

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from trainer.tokenizer import byte_letters, control_ids, decoder_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPACE_MARK = "▁"


class TokenText:
    """Pieces of text of token ids; without a tokenizer the ids themselves."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self._tokenizer = tokenizer
        self._special: frozenset[int] = frozenset()
        self._added: dict[int, str] = {}
        self._alphabet: dict[str, int] | None = None
        self._spelled = False
        if tokenizer is not None:
            self._added = {id_: token.content for id_, token in tokenizer.added_tokens_decoder.items()}
            self._special = control_ids(tokenizer)
            kinds = {part["type"] for part in decoder_parts(tokenizer) or []}
            if "ByteLevel" in kinds:
                self._alphabet = byte_letters()
            # Pieces of SentencePiece vocabularies are spelled as text, with marks for spaces.
            self._spelled = bool(kinds & {"Metaspace", "ByteFallback"})
        self._bytes = lru_cache(1 << 18)(self._make_bytes)

    def is_control(self, token_id: int) -> bool:
        """The token stands for no text: a special token, or an id that the tokenizer does not have."""
        if self._tokenizer is None:
            return False
        return token_id in self._special or self._bytes(token_id) is None

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each of these tokens, which follow each other, completes. Control tokens are spelled out."""
        if self._tokenizer is None:
            return [f"{id_} " for id_ in ids]
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        pieces: list[str] = []
        for id_ in ids:
            data = None if id_ in self._special else self._bytes(id_)
            if data is not None:
                pieces.append(decoder.decode(data))
                continue
            if pieces:
                pieces[-1] += decoder.decode(b"", True)
            pieces.append(self._added.get(id_, f"<id {id_}>"))
        if pieces:
            pieces[-1] += decoder.decode(b"", True)
        return pieces

    def _make_bytes(self, id_: int) -> bytes | None:
        """UTF-8 bytes that a token stands for; None for an id without a token."""
        assert self._tokenizer is not None
        if id_ in self._added:
            return self._added[id_].encode()
        if id_ >= len(self._tokenizer):
            return None
        token = self._tokenizer.convert_ids_to_tokens(id_)
        if not isinstance(token, str):
            return None
        if self._alphabet is not None and self._alphabet.keys() >= set(token):
            return bytes(self._alphabet[letter] for letter in token)
        if self._spelled:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace(_SPACE_MARK, " ").encode()
        text = self._tokenizer.decode([id_])
        return (text if isinstance(text, str) else "".join(text)).encode()
