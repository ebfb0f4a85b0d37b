"""Which piece of the text each token completes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainer.inspect.token_text import TokenText


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny_tokenizer)


@pytest.mark.parametrize("text", ["ba ko, ritu.\n", "naïve 東京 🐕\t\x00", "\x1b[31mred\x1b[0m <|pad|>x<|endoftext|>"])
def test_the_pieces_are_the_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(TokenText(tokenizer).pieces(ids)) == text


def test_a_character_belongs_to_the_token_that_completes_it(
    tokenizer: PreTrainedTokenizerFast, letters: Callable[[str], list[int]]
) -> None:
    euro = letters("€")
    texts = TokenText(tokenizer)
    assert texts.pieces([*letters("a"), *euro, *letters("b")]) == ["a", "", "", "€", "b"]
    assert texts.pieces([*euro[:2], 0, euro[2]]) == ["", "\\xe2\\x82", "<|endoftext|>", "\\xac"]
    assert texts.pieces(euro[:1]) == ["\\xe2"]
    assert texts.pieces([]) == []


def test_control_tokens_and_ids_that_the_tokenizer_does_not_have(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = TokenText(tokenizer)
    assert [texts.is_control(id_) for id_ in (0, 1, 2, 299, 300)] == [True, True, False, False, True]
    assert texts.pieces([300]) == ["<id 300>"]


def test_a_sentencepiece_vocabulary() -> None:
    """Spaces at the start of a window stay, bytes join to characters."""
    vocab = {"<unk>": 0, "▁a": 1, "b": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert TokenText(tokenizer).pieces([1, 2, 3, 4, 5, 1]) == [" a", "b", "", "", "€", " a"]
    assert TokenText(tokenizer).is_control(0)


def test_without_a_tokenizer_ids_are_shown() -> None:
    texts = TokenText(None)
    assert texts.pieces([5, 70000]) == ["5 ", "70000 "]
    assert not texts.is_control(5)
