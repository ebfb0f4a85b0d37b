"""Which UTF-8 bytes of text each token stands for.

Bits per byte compare models with different tokenizers, so the bytes must be those of the text and of nothing else.
Those of a token are read off its spelling in the vocabulary. Decoding single tokens would be wrong: a token that holds
part of a character decodes to U+FFFD, which has three bytes.
"""

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.errors import ConfigError
from trainer.tokenizer import byte_letters, control_ids, decoder_parts, num_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE_MARK = "▁"
"""A space in the vocabularies of SentencePiece."""

_BYTE_LEVEL_SPACE = "Ġ"
_SENTENCEPIECE_PARTS = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
_SAMPLE = "i love borzois! 🐕  naïve café,\n\tx = 10 ** 23  # 東京\n\nAwkward   spaces 🐕 ."
"""Holds what a wrong rule trips over: parts of characters, runs of spaces, tabs, spaces before rare characters."""


def token_bytes(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> np.ndarray:
    """UTF-8 bytes of each token inside a text.

    A tokenizer that puts a space of its own before a text (`adds_leading_space`) spells that space in the text's
    first token, whose count is then one more than the text has.

    Args:
        tokenizer: see token_spellings.
        vocab_size: ids the model knows.

    Returns:
        (vocab_size,) int64; 0 for special tokens and for ids that the tokenizer does not have.

    Raises:
        ConfigError: the tokenizer is of another kind, or the counts do not add up on a sample text. Never guessed.
    """
    counts = np.zeros(vocab_size, np.int64)
    spellings = token_spellings(tokenizer)[:vocab_size]
    counts[: len(spellings)] = [len(spelling) for spelling in spellings]
    adds_leading_space(tokenizer, counts)  # or refuses counts that do not add up
    return counts


def token_spellings(tokenizer: "PreTrainedTokenizerBase") -> list[bytes]:
    """The bytes of each token inside a text, by id; empty for special tokens and ids that are none.

    Args:
        tokenizer: a byte-level BPE, a SentencePiece model converted to `tokenizers`, or ByT5's bytes.

    Raises:
        ConfigError: the tokenizer is of another kind.
    """
    spellings = [b""] * num_ids(tokenizer)
    own = byte_ids(tokenizer)
    if own is not None:
        for byte, id_ in enumerate(own):
            spellings[id_] = bytes([byte])
        return spellings
    decoder = _decoder_types(tokenizer)
    added = tokenizer.added_tokens_decoder
    silent = control_ids(tokenizer) | _unknown_ids(tokenizer)
    letters = byte_letters()
    for token, id_ in tokenizer.get_vocab().items():
        if id_ in silent:
            continue
        if id_ in added:
            if added[id_].lstrip or added[id_].rstrip:
                raise _refused(f"its token {token!r} swallows the spaces beside it")
            spellings[id_] = token.encode()
        elif decoder != {"ByteLevel"}:
            spellings[id_] = _sentencepiece_bytes(token, decoder)
        elif letters.keys() >= set(token):
            spellings[id_] = bytes(letters[letter] for letter in token)
        else:
            raise _refused(f"its token {token!r} is not spelled in the byte alphabet")
    return spellings


def byte_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int] | None:
    """Ids of the 256 bytes where the tokenizer has no other tokens for text, as ByT5's; None for the rest."""
    from transformers import ByT5Tokenizer

    if not isinstance(tokenizer, ByT5Tokenizer):
        return None
    plain = tokenizer.added_tokens_decoder.keys() - control_ids(tokenizer)
    if plain:
        token = tokenizer.convert_ids_to_tokens(min(plain))
        raise _refused(f"it has tokens beside those of single bytes, {token!r} for one")
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[chr(byte)] for byte in range(256)]


def _decoder_types(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """Types of the decoder's parts, which say how tokens spell text."""
    parts = decoder_parts(tokenizer)
    if parts is None:
        raise _refused("it has no fast (`tokenizers`) form")
    types = {part["type"] for part in parts}
    turns_mark_to_space = any(
        part["type"] == "Metaspace"
        or (part["type"] == "Replace" and part["pattern"] == {"String": SPACE_MARK} and part["content"] == " ")
        for part in parts
    )
    if types != {"ByteLevel"} and not (turns_mark_to_space and types <= _SENTENCEPIECE_PARTS):
        raise _refused(f"its decoder is {' + '.join(sorted(types))}, neither byte-level nor SentencePiece")
    if turns_mark_to_space and SPACE_MARK not in tokenizer.get_vocab():
        raise _refused(f"its vocabulary lacks {SPACE_MARK!r}, so it spells a space in three byte tokens")
    return types


def _unknown_ids(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """What the model of the tokenizer writes for text that it does not know, declared a special token or not."""
    from tokenizers.models import Unigram

    backend: Any = tokenizer.backend_tokenizer
    if isinstance(backend.model, Unigram):
        unknown = json.loads(backend.model.__getstate__())["unk_id"]
    else:
        unknown = backend.token_to_id(backend.model.unk_token or "")
    return set() if unknown is None else {unknown}


def _sentencepiece_bytes(token: str, decoder: set[str]) -> bytes:
    if "ByteFallback" in decoder and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(SPACE_MARK, " ").encode()


def adds_leading_space(tokenizer: "PreTrainedTokenizerBase", counts: np.ndarray) -> bool:
    """Whether the tokenizer puts a space of its own before every text.

    Args:
        counts: its `token_bytes`.

    Raises:
        ConfigError: they do not add up to the bytes of a sample text.
    """
    try:
        ids = [id_ for id_ in tokenizer.encode(_SAMPLE, add_special_tokens=False) if id_ < len(counts)]
    except BaseException as error:
        if not is_panic(error):
            raise
        raise _refused(f"it cannot encode a sample text ({error})") from error
    counted, real = int(counts[ids].sum()), len(_SAMPLE.encode())
    first = tokenizer.convert_ids_to_tokens(ids[0]) if ids else ""
    leading_space = str(first).startswith((SPACE_MARK, _BYTE_LEVEL_SPACE))
    if counted - real != int(leading_space):
        raise _refused(f"its tokens count {counted} bytes on a sample text of {real}")
    return leading_space


def is_panic(error: BaseException) -> bool:
    """A panic of the tokenizers library (a pattern that never ends, say), which is no Exception."""
    return type(error).__name__ == "PanicException"


def _refused(reason: str) -> ConfigError:
    return ConfigError.one("tokenizer.name", f"bits per byte cannot be computed with this tokenizer: {reason}")
