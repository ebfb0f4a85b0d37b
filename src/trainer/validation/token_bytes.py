"""The one bytes rule: how many UTF-8 bytes of text each token stands for.

Bits per byte compare models with different tokenizers, so the bytes must be those of the text and of nothing else.
The count of a token is read off its spelling in the vocabulary. Decoding single tokens would be wrong: a token that
holds part of a character decodes to U+FFFD, which has three bytes.
"""

from typing import TYPE_CHECKING

import numpy as np

from configs.errors import ConfigError
from trainer.tokenizer import byte_letters, control_ids, decoder_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPACE_MARK = "▁"
_BYTE_LEVEL_SPACE = "Ġ"
_SENTENCEPIECE_PARTS = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
_SAMPLE = "i love borzois! 🐕  naïve café,\n\tx = 10 ** 23  # 東京\n\nAwkward   spaces 🐕 ."
"""Holds what a wrong rule trips over: parts of characters, runs of spaces, tabs, spaces before rare characters."""


def token_bytes(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> np.ndarray:
    """UTF-8 bytes of each token inside a text.

    A tokenizer that puts a space of its own before a text (`adds_leading_space`) spells that space in the text's
    first token, whose count is then one more than the text has.

    Args:
        tokenizer: a byte-level BPE, or a SentencePiece model converted to `tokenizers`.
        vocab_size: ids the model knows.

    Returns:
        (vocab_size,) int64; 0 for special tokens and for ids that the tokenizer does not have.

    Raises:
        ConfigError: the tokenizer is of another kind, or the counts do not add up on a sample text. Never guessed.
    """
    decoder = _decoder_types(tokenizer)
    added = tokenizer.added_tokens_decoder
    special = control_ids(tokenizer)
    counts = np.zeros(vocab_size, np.int64)
    alphabet = byte_letters().keys()
    for token, id_ in tokenizer.get_vocab().items():
        if id_ >= vocab_size or id_ in special:
            continue
        if id_ in added:
            if added[id_].lstrip or added[id_].rstrip:
                raise _refused(f"its token {token!r} swallows the spaces beside it")
            counts[id_] = len(token.encode())
        elif decoder != {"ByteLevel"}:
            counts[id_] = _sentencepiece_bytes(token, decoder)
        elif alphabet >= set(token):
            counts[id_] = len(token)  # one letter of the alphabet per byte
        else:
            raise _refused(f"its token {token!r} is not spelled in the byte alphabet")
    _check_on_sample(tokenizer, counts)
    return counts


def adds_leading_space(tokenizer: "PreTrainedTokenizerBase", counts: np.ndarray) -> bool:
    """Whether the tokenizer puts a space of its own before every text. `counts`: its `token_bytes`."""
    return _check_on_sample(tokenizer, counts)


def _decoder_types(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """Types of the decoder's parts, which say how tokens spell text."""
    parts = decoder_parts(tokenizer)
    if parts is None:
        raise _refused("it has no fast (`tokenizers`) form")
    types = {part["type"] for part in parts}
    turns_mark_to_space = any(
        part["type"] == "Metaspace"
        or (part["type"] == "Replace" and part["pattern"] == {"String": _SPACE_MARK} and part["content"] == " ")
        for part in parts
    )
    if types != {"ByteLevel"} and not (turns_mark_to_space and types <= _SENTENCEPIECE_PARTS):
        raise _refused(f"its decoder is {' + '.join(sorted(types))}, neither byte-level nor SentencePiece")
    if turns_mark_to_space and _SPACE_MARK not in tokenizer.get_vocab():
        raise _refused(f"its vocabulary lacks {_SPACE_MARK!r}, so it spells a space in three byte tokens")
    return types


def _sentencepiece_bytes(token: str, decoder: set[str]) -> int:
    if "ByteFallback" in decoder and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace(_SPACE_MARK, " ").encode())


def _check_on_sample(tokenizer: "PreTrainedTokenizerBase", counts: np.ndarray) -> bool:
    """Refuse counts that do not add up to a sample text's bytes. True: they do with one space put before the text."""
    try:
        ids = [id_ for id_ in tokenizer.encode(_SAMPLE, add_special_tokens=False) if id_ < len(counts)]
    except BaseException as error:
        # A panic of the Rust library (a pattern that never ends, say) is no Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise _refused(f"it cannot encode a sample text ({error})") from error
    counted, real = int(counts[ids].sum()), len(_SAMPLE.encode())
    first = tokenizer.convert_ids_to_tokens(ids[0]) if ids else ""
    leading_space = str(first).startswith((_SPACE_MARK, _BYTE_LEVEL_SPACE))
    if counted - real != int(leading_space):
        raise _refused(f"its tokens count {counted} bytes on a sample text of {real}")
    return leading_space


def _refused(reason: str) -> ConfigError:
    return ConfigError.one("tokenizer.name", f"bits per byte cannot be computed with this tokenizer: {reason}")
