"""The bytes that are scored are those of the text, with every family of tokenizers."""

import random
import unicodedata
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from configs.errors import ConfigError
from trainer.data.errors import DataError
from trainer.validation.sets.text_encoder import TextEncoder
from trainer.validation.sets.text_set import TextSet
from trainer.validation.token_bytes import token_bytes, token_spellings

TEXTS = [
    "i love borzois! 🐕",
    "the 東京 then\n\n\tnaïve café 🐕🐕",
    " leads with a space",
    "  two, and ends with two  ",
    "é",
    "京",
    " ",
    "\n",
    "a<|bos|>b <s> </s> <pad> <|endoftext|>",
    "<|bos|>",
    "👩‍👩‍👧‍👦 flags 🇯🇵, \u0000 and \u200b",
]
CHANGED = {
    # Marks of SentencePiece become spaces; NFC composes, or takes apart what it has excluded (3 bytes to 6).
    "a▁b ▁": "SentencePiece",
    "cafe\u0301 e\u0301": "NFC",
    " cafe\u0301": "NFC",
    "\u0958": "NFC",
}


def scored_bytes(set_: TextSet, seq_len: int) -> int:
    windows = set_.windows(seq_len)
    return int(set_.read(windows, np.arange(len(windows.sequences))).num_bytes.sum())


@pytest.mark.parametrize("seq_len", [2, 5, 64])
def test_with_a_prefix_the_scored_bytes_are_the_texts(
    make_set: Callable[..., TextSet], any_tokenizer: PreTrainedTokenizerBase, seq_len: int
) -> None:
    """Field cases R101 and R103, with emoji and CJK cut between tokens and windows."""
    set_ = make_set([{"text": text} for text in TEXTS], tokenizer=any_tokenizer, prefix_id=1)
    assert set_.notes == []
    assert scored_bytes(set_, seq_len) == len("".join(TEXTS).encode())


def test_random_texts_keep_their_bytes(any_tokenizer: PreTrainedTokenizerBase) -> None:
    generator = random.Random(0)
    letters = "ethn a\n\t<>|s🐕東京é\u00a0\u3000.0"
    encoder = TextEncoder(any_tokenizer)
    counts = token_bytes(any_tokenizer, 512)
    for _ in range(300):
        text = "".join(generator.choices(letters, k=generator.randint(1, 12)))
        (ids,) = encoder.encode([text])
        leading_space, changed = encoder.compare(text, ids)
        assert not changed, repr(text)
        assert counts[ids].sum() - leading_space == len(text.encode()), repr(text)


def test_without_a_prefix_each_windows_first_token_is_left_out(
    make_set: Callable[..., TextSet], any_tokenizer: PreTrainedTokenizerBase
) -> None:
    texts = [text for text in TEXTS if len(text) > 2]
    set_ = make_set([{"text": text} for text in texts], tokenizer=any_tokenizer)
    counts = token_bytes(any_tokenizer, 512)
    spellings = token_spellings(any_tokenizer)
    encoder = TextEncoder(any_tokenizer)
    expected = 0
    for text, ids in zip(texts, encoder.encode(texts), strict=True):
        own_space = b"".join(spellings[id_] for id_ in ids) != text.encode()
        firsts = counts[ids[::5]].sum() - own_space
        expected += len(text.encode()) - firsts
    assert scored_bytes(set_, 5) == expected


def test_a_space_of_the_tokenizers_own_counts_nothing(make_set: Callable[..., TextSet]) -> None:
    """Llama 2: "the" is ▁the, four bytes of which the text has three."""
    set_ = make_set([{"text": "the the"}], family="SentencePiece, Prepend", prefix_id=7)
    windows = set_.windows(8)
    piece = set_.read(windows, np.array([0]))
    assert piece.input_ids[0] == 7
    assert piece.labels.size == 2 and piece.labels[0] == piece.labels[1]
    assert piece.num_bytes == 7


def test_the_space_is_in_no_other_window(make_set: Callable[..., TextSet]) -> None:
    """Without a prefix the first token is not scored, so nothing is taken off the second."""
    set_ = make_set([{"text": "the the"}], family="SentencePiece, Prepend")
    assert scored_bytes(set_, 8) == 4
    set_ = make_set([{"context": "the", "continuation": " the"}], family="SentencePiece, Prepend", prefix_id=7)
    assert scored_bytes(set_, 8) == 4
    # Nor where the prefix stands before the context, whose first token the space is in.
    set_ = make_set(
        [{"context": "the", "continuation": " the"}], family="SentencePiece, Prepend", prefix_id=7, always=True
    )
    assert scored_bytes(set_, 8) == 4
    set_ = make_set([{"context": "", "continuation": "the"}], family="SentencePiece, Prepend", prefix_id=7)
    assert scored_bytes(set_, 8) == 3


@pytest.mark.parametrize("text", CHANGED)
def test_changed_text_is_told_and_counts_as_it_is_spelled(
    make_set: Callable[..., TextSet], any_tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    set_ = make_set([{"text": "the"}, {"text": text}], tokenizer=any_tokenizer, prefix_id=1)
    backend = str(getattr(any_tokenizer, "backend_tokenizer", None) and any_tokenizer.backend_tokenizer.to_str())
    normal = unicodedata.normalize("NFC", text) if '"NFC"' in backend else text
    if "▁" in any_tokenizer.get_vocab():
        normal = normal.replace("▁", " ")
    assert scored_bytes(set_, 64) == len(("the" + normal).encode())
    if normal == text:
        assert set_.notes == []
    else:
        (note,) = set_.notes
        assert "documents that the tokenizer changes" in note
        assert note.endswith("rows.jsonl, line 2)")


def test_one_changed_option_makes_a_document_changed(make_set: Callable[..., TextSet]) -> None:
    rows = [{"choices": ["cafe\u0301", "the"], "answer": 1}, {"choices": ["a", "the"], "answer": 1}]
    (note,) = make_set(rows, family="byte-level BPE, NFC").notes
    assert "documents that the tokenizer changes" in note
    assert ": 1 (" in note and note.endswith("rows.jsonl, line 1)")


def test_text_that_spells_a_control_token_is_text(make_set: Callable[..., TextSet]) -> None:
    set_ = make_set([{"text": "<|bos|>"}], prefix_id=1)
    piece = set_.read(set_.windows(64), np.array([0]))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert "".join(letters[label] for label in piece.labels) == "<|bos|>"
    assert piece.num_bytes == 7


def test_a_control_token_that_cannot_be_told_from_text_is_refused(make_set: Callable[..., TextSet]) -> None:
    """Unigram finds the piece <unk> in text that spells it."""
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 1: holds text that the tokenizer turns into '<unk>'"):
        make_set([{"text": "the <unk>"}], family="Unigram")


def test_unknown_tokens_are_refused_with_their_row(
    make_set: Callable[..., TextSet], tokenizer_of: Callable[[str], PreTrainedTokenizerBase]
) -> None:
    """Field case R103: an unknown token spells nothing, and bits per byte would leave its bytes out."""
    tokenizer = tokenizer_of("byte-level BPE")
    raw = tokenizer.backend_tokenizer
    vocabulary = raw.get_vocab(with_added_tokens=False)
    raw.model = models.BPE({token: id_ for token, id_ in vocabulary.items() if id_ < 256}, [], unk_token="?")
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 2: holds text that the tokenizer turns into '\?', whose"):
        make_set([{"text": "a"}, {"text": "b?"}], tokenizer=tokenizer)


def test_text_without_a_token_is_refused() -> None:
    """A byte that the vocabulary lacks is dropped without a sign."""
    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"z"})
    raw = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    encoder = TextEncoder(PreTrainedTokenizerFast(tokenizer_object=raw))
    (ids,) = encoder.encode(["fuzzy"])
    with pytest.raises(DataError, match="text that the tokenizer leaves out"):
        encoder.compare("fuzzy", ids)


def test_a_letter_of_the_tokenizers_own_is_no_space() -> None:
    raw = Tokenizer(models.BPE({letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    raw.normalizer = normalizers.Prepend("x")
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    encoder = TextEncoder(PreTrainedTokenizerFast(tokenizer_object=raw))
    (ids,) = encoder.encode(["a"])
    assert encoder.compare("a", ids) == (False, True)


def test_added_tokens_that_are_no_control_tokens_are_text(
    make_set: Callable[..., TextSet], tokenizer_of: Callable[[str], PreTrainedTokenizerBase]
) -> None:
    tokenizer = tokenizer_of("SentencePiece, no space")
    tokenizer.add_tokens([AddedToken("<é>", special=False, normalized=False)])
    set_ = make_set([{"text": "a<é>東"}], tokenizer=tokenizer, prefix_id=1)
    assert scored_bytes(set_, 8) == 8
    assert set_.windows(8).num_inputs.tolist() == [3]


def test_dropout_is_refused(tokenizer_of: Callable[[str], PreTrainedTokenizerBase]) -> None:
    tokenizer = tokenizer_of("byte-level BPE")
    tokenizer.backend_tokenizer.model.dropout = 0.1
    with pytest.raises(ConfigError, match="other tokens each time"):
        _ = TextEncoder(tokenizer).digest


def test_what_others_set_in_the_tokenizer_does_not_matter(
    tokenizer_of: Callable[[str], PreTrainedTokenizerBase],
) -> None:
    tokenizer = tokenizer_of("byte-level BPE that adds BOS")
    plain = TextEncoder(tokenizer)
    digest = plain.digest
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    other = TextEncoder(tokenizer)
    assert other.encode(["the other"]) == plain.encode(["the other"])
    assert len(other.encode(["the other"])[0]) > 2
    assert other.digest == digest
