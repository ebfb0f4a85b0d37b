from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from configs.errors import ConfigError
from trainer.tokenizer import load_tokenizer
from trainer.validation.token_bytes import adds_leading_space, token_bytes, token_spellings

BORZOIS = "i love borzois! 🐕"


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece(*, space_mark: bool = True, prepend: bool = False) -> PreTrainedTokenizerFast:
    """A Llama-2-like tokenizer: ▁ for a space, bytes as <0xNN>."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ["▁"] * space_mark + ["l", "o", "v", "e", "i", "é"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    steps: list = [normalizers.Prepend("▁")] * prepend + [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    parts: list = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * prepend)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def counted(tokenizer: PreTrainedTokenizerFast, text: str, vocab_size: int = 512) -> int:
    return int(token_bytes(tokenizer, vocab_size)[tokenizer.encode(text, add_special_tokens=False)].sum())


def test_a_raw_byte_token_is_one_byte() -> None:
    """Field case R101: a token that is part of a character is one byte, not the three of U+FFFD."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    assert token_bytes(tokenizer, 256).tolist() == [1] * 256
    assert counted(tokenizer, BORZOIS) == 20


def test_a_trained_tokenizer_counts_the_texts_bytes(tiny_tokenizer: Path) -> None:
    """Field case R101: the sum over "i love borzois! 🐕" is 20."""
    tokenizer = load_tokenizer(str(tiny_tokenizer))
    counts = token_bytes(tokenizer, 384)
    assert counts[tokenizer.encode(BORZOIS)].sum() == 20
    assert counts.dtype == np.int64
    assert counts[:2].tolist() == [0, 0], "special tokens"
    assert counts[300:].tolist() == [0] * 84, "ids beyond the tokenizer"
    assert (counts[2:300] > 0).all()


def test_added_tokens_that_are_not_special_count_their_text() -> None:
    raw = byte_level()
    raw.add_tokens([AddedToken("<é>", special=False)])
    raw.add_special_tokens(["<|x|>"])
    assert token_bytes(PreTrainedTokenizerFast(tokenizer_object=raw), 258)[256:].tolist() == [4, 0]


def test_sentencepiece_marks_are_one_space_and_byte_tokens_one_byte() -> None:
    tokenizer = sentencepiece()
    counts = token_bytes(tokenizer, 512)
    assert counts[tokenizer.convert_tokens_to_ids("▁")] == 1
    assert counts[tokenizer.convert_tokens_to_ids("é")] == 2
    assert counts[255] == 1
    assert counted(tokenizer, BORZOIS) == 20
    assert not adds_leading_space(tokenizer, counts)


def test_a_space_before_every_text_is_seen() -> None:
    tokenizer = sentencepiece(prepend=True)
    assert adds_leading_space(tokenizer, token_bytes(tokenizer, 512))


def test_a_sentencepiece_model_without_the_mark_is_refused() -> None:
    """Field case R103: the mark would be spelled by three byte tokens, three bytes for one space."""
    with pytest.raises(ConfigError, match="spells a space in three byte tokens"):
        token_bytes(sentencepiece(space_mark=False), 512)


def test_other_decoders_are_refused() -> None:
    raw = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="its decoder is WordPiece, neither byte-level nor SentencePiece"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=raw), 1)


def test_counts_that_do_not_add_up_are_refused() -> None:
    raw = byte_level()
    raw.normalizer = normalizers.Replace("love", "")
    with pytest.raises(ConfigError, match=r"its tokens count \d+ bytes on a sample text of \d+"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=raw), 256)


def test_byt5_has_a_token_for_each_byte() -> None:
    counts = token_bytes(ByT5Tokenizer(), 384)
    assert counts.tolist() == [0] * 3 + [1] * 256 + [0] * 125
    tokenizer = ByT5Tokenizer()
    tokenizer.add_tokens(["<thought>"])
    with pytest.raises(ConfigError, match="tokens beside those of single bytes, '<thought>' for one"):
        token_bytes(tokenizer, 385)


def test_the_models_unknown_token_spells_nothing() -> None:
    """Field case R103: whether it is declared a special token or not."""
    raw = sentencepiece().backend_tokenizer
    vocabulary = raw.get_vocab() | {"<unk>": raw.get_vocab_size()}
    raw.model = models.BPE(vocabulary, [], unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    spellings = token_spellings(tokenizer)
    assert spellings[vocabulary["<unk>"]] == b""
    assert spellings[0xE9] == b"\xe9"
    assert spellings[vocabulary["é"]] == "é".encode()
    assert spellings[vocabulary["▁"]] == b" "


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_a_token_that_swallows_spaces_is_refused(side: str) -> None:
    raw = byte_level()
    raw.add_tokens([AddedToken("<x>", special=False, **{side: True})])
    with pytest.raises(ConfigError, match="'<x>' swallows the spaces"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=raw), 257)


def test_what_looks_like_a_byte_is_text_without_byte_fallback() -> None:
    raw = Tokenizer(models.BPE({"<0x41>": 0, "▁": 1}, []))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    assert token_spellings(PreTrainedTokenizerFast(tokenizer_object=raw)) == [b"<0x41>", b" "]
