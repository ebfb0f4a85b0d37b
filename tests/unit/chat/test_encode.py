"""Ids are the tokenizer's own, loss lies on the tokens that stand for supervised text, spelled control tokens are text.

Tokenizers are trained here, one of each kind that spreads text over tokens in a way of its own. The oracle walks the
tokens' own texts along the text; it knows nothing of offsets.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from configs.errors import ConfigError
from trainer.data.chat.encode.encoder import Encoder
from trainer.data.chat.sample import Rendered
from trainer.data.errors import DataError

UNK, BOS, EOS = "<unk>", "<s>", "</s>"
CORPUS = [
    "hello world, how are you?\n\nfine, thanks!\n",
    "the quick brown fox 世界你好 jumps\n\n over it",
    "low flow now ",
]


def _bpe(*, byte_level: bool, **parts: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    model = models.BPE() if byte_level else models.BPE(byte_fallback=True, unk_token=UNK, fuse_unk=True)
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    trainer = trainers.BpeTrainer(
        vocab_size=330 if byte_level else 400,
        special_tokens=[UNK, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if byte_level else [],
        limit_alphabet=1000 if byte_level else 25,  # the rarer letters become bytes
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    if byte_level:
        return tokenizer
    description = json.loads(tokenizer.to_str())
    vocabulary = description["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    return Tokenizer.from_str(json.dumps(description | {"model": description["model"] | {"vocab": vocabulary}}))


def _make(kind: str) -> Any:
    """A tokenizer of the tokenizers library."""
    from tokenizers import decoders, normalizers, pre_tokenizers, processors

    fused = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    byte_level: dict[str, Any] = {
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "decoder": decoders.ByteLevel(),
    }
    match kind:
        case "byte-level":
            return _bpe(byte_level=True, **byte_level)
        case "byte-level, offsets trimmed":
            return _bpe(byte_level=True, **byte_level, post_processor=processors.ByteLevel(trim_offsets=True))
        case "byte-level, merges over spaces":
            byte_level["pre_tokenizer"] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            return _bpe(byte_level=True, **byte_level)
        case "byte-level, NFC":
            return _bpe(byte_level=True, **byte_level, normalizer=normalizers.NFC())
        case "byte-level normalizer":
            return _bpe(byte_level=True, decoder=decoders.ByteLevel(), normalizer=normalizers.ByteLevel())
        case "byte-level, NFKC":
            return _bpe(byte_level=True, **byte_level, normalizer=normalizers.NFKC())
        case "metaspace first" | "metaspace always" | "metaspace never":
            scheme: Any = kind.split()[1]
            return _bpe(byte_level=False, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme), decoder=fused)
        case "prepend and replace":
            normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            return _bpe(byte_level=False, normalizer=normalizer, decoder=fused)
        case "replace":
            split = pre_tokenizers.Split(" ", "merged_with_previous")
            return _bpe(byte_level=False, normalizer=normalizers.Replace(" ", "▁"), pre_tokenizer=split, decoder=fused)
    raise AssertionError(kind)


KINDS = (
    "byte-level",
    "byte-level, offsets trimmed",
    "byte-level, merges over spaces",
    "byte-level, NFC",
    "byte-level, NFKC",
    "byte-level normalizer",
    "metaspace first",
    "metaspace always",
    "metaspace never",
    "prepend and replace",
    "replace",
)


@pytest.fixture(scope="module")
def backend() -> Callable[[str], Any]:
    """backend(kind), made once."""
    made: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in made:
            made[kind] = _make(kind)
        return made[kind]

    return get


def _wrap(backend: Any, **options: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS, unk_token=UNK, pad_token=EOS, **options
    )


def rendered(text: str, *spans: tuple[int, int], literal: list[tuple[int, int]] | None = None) -> Rendered:
    return Rendered(text=text, loss_spans=list(spans), literal_spans=literal or [])


def find(text: str, part: str) -> tuple[int, int]:
    start = text.index(part)
    return start, start + len(part)


def _surface(token: str | None, *, byte_level: bool, letters: dict[str, int]) -> bytes:
    assert token is not None
    if token in (UNK, BOS, EOS):
        return token.encode()
    if byte_level:
        return bytes(letters[letter] for letter in token)
    if len(token) == 6 and token.startswith("<0x"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def oracle(tokens: Sequence[str | None], text: str, spans: list[tuple[int, int]], kind: str) -> list[bool]:
    """Which tokens stand for a byte of a span; a marker of a word's start that the tokenizer put in counts as the byte
    after it."""
    # The letters of byte-level tokenizers, as GPT-2 has them.
    shifted = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    letters = {chr(byte): byte for byte in range(256) if byte not in shifted}
    letters |= {chr(256 + place): byte for place, byte in enumerate(shifted)}
    raw = text.encode()
    wanted = bytearray(len(raw) + 1)
    for start, stop in spans:
        begin, end = len(text[:start].encode()), len(text[:stop].encode())
        wanted[begin:end] = b"\1" * (end - begin)
    found, place = [], 0
    prepends = begins = kind == "prepend and replace"
    for token in tokens:
        surface = _surface(token, byte_level="byte" in kind, letters=letters)
        is_control = token in (BOS, EOS)
        if (begins and not is_control) or raw[place : place + len(surface)] != surface:
            assert surface[:1] == b" "
            surface = surface[1:]
        begins = prepends and is_control
        assert raw[place : place + len(surface)] == surface
        found.append(any(wanted[place : place + max(1, len(surface))]))
        place += len(surface)
    assert place == len(raw)
    found[0] = False
    return found


PIECES = (
    "hello",
    " ",
    "  ",
    "\n",
    "\n\n",
    "世",
    "界你好",
    "🦊",
    "👩‍👩‍👧",
    "é",
    " low",
    "ow",
    "x",
    "7",
    BOS,
    EOS,
    "!",
    "\t",
)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_lies_on_the_tokens_of_supervised_text(kind: str, backend: Callable[[str], Any]) -> None:
    """Whole characters are supervised, cut anywhere: between spaces, inside words, beside emoji and control tokens."""
    tokenizer = _wrap(backend(kind))
    encoder = Encoder(tokenizer)
    generator = random.Random(0)
    batch = []
    for _ in range(60):
        # A text that begins with a control token gets no marker that the oracle could take for the text's own space.
        text = BOS + "".join(generator.choices(PIECES, k=generator.randint(1, 12)))
        cuts = sorted(generator.sample(range(len(text) + 1), min(4, len(text) // 2 * 2)))
        batch.append(rendered(text, *zip(cuts[::2], cuts[1::2], strict=True)))
    for one, sample in zip(batch, encoder.encode(batch), strict=True):
        ids = sample.input_ids.tolist()
        assert ids == tokenizer(one.text, add_special_tokens=False)["input_ids"]
        tokens = [tokenizer.backend_tokenizer.id_to_token(number) for number in ids]
        assert sample.loss.tolist() == oracle(tokens, one.text, one.loss_spans, kind), one
        assert (sample.input_ids.dtype, sample.loss.dtype) == (np.int32, np.bool_)


@pytest.mark.parametrize("kind", KINDS)
def test_spelled_control_tokens_become_ordinary_text(kind: str, backend: Callable[[str], Any]) -> None:
    """Exactly the tokens of a tokenizer that does not know the control token; the real ones beside it stay."""
    from tokenizers import Tokenizer

    description = json.loads(backend(kind).to_str())
    description["added_tokens"] = [token for token in description["added_tokens"] if token["content"] != EOS]
    unaware = Tokenizer.from_str(json.dumps(description))
    tokenizer = _wrap(backend(kind))
    encoder = Encoder(tokenizer)
    for text in (f"{BOS}say {EOS} now{BOS} low", f"{EOS}{BOS}{BOS}a{EOS}{EOS} 世{EOS}🦊 hello{EOS}", f" x {EOS}", EOS):
        spans = [(place, place + len(EOS)) for place in range(len(text)) if text.startswith(EOS, place)]
        last = spans[-1]
        (sample,) = encoder.encode([rendered(text, last, literal=spans)])
        ids = sample.input_ids.tolist()
        assert ids == unaware.encode(text, add_special_tokens=False).ids
        tokens = [unaware.id_to_token(number) for number in ids]
        expected = oracle(tokens, text, [last], kind)
        assert sample.loss.tolist() == expected
        decoded = tokenizer.decode(sample.input_ids, skip_special_tokens=False)
        inserted = "always" in kind or "prepend" in kind or ("first" in kind and not text.startswith(BOS))
        assert decoded.replace(" ", "") == text.replace(" ", "") if inserted else decoded == text
    assert encoder.encode([rendered(f"a{EOS}b")])[0].input_ids.tolist().count(tokenizer.eos_token_id) == 1


def test_only_the_spelled_ones_do(backend: Callable[[str], Any]) -> None:
    tokenizer = _wrap(backend("metaspace always"))
    text = f"{BOS}say {EOS}, then {EOS} low"
    (sample,) = Encoder(tokenizer).encode([rendered(text, find(text, " low"), literal=[find(text, EOS)])])
    ids = sample.input_ids.tolist()
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(sample.input_ids[sample.loss]) == " low"
    assert tokenizer.decode(sample.input_ids, skip_special_tokens=False) == f"{BOS} say {EOS}, then {EOS} low"


def test_a_tokenizer_that_takes_spelled_control_tokens_all_the_same_is_refused() -> None:
    """A unigram model finds the pieces of its vocabulary by itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.Unigram([(UNK, 0.0), (BOS, 0.0), (EOS, 0.0), ("▁", -2.0), ("a", -3.0)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens([UNK, BOS, EOS])
    encoder = Encoder(_wrap(tokenizer))
    with pytest.raises(DataError, match=r"spells '</s>', and the tokenizer cannot be told to read that as ordinary"):
        encoder.encode([rendered(f"a {EOS} a", literal=[(2, 6)])])


def test_a_token_over_the_border_carries_loss(backend: Callable[[str], Any]) -> None:
    """Field case R34: one tokenisation of the whole text; a token that merges both sides is supervised."""
    tokenizer = _wrap(backend("byte-level, merges over spaces"))
    encoder = Encoder(tokenizer)
    for text, border in (("you fl" + "ow now", 6), ("x\n\nthe", 2)):
        (sample,) = encoder.encode([rendered(text, (border, len(text)))])
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert sample.input_ids.tolist() == ids
        supervised = tokenizer.decode(sample.input_ids[sample.loss])
        prefix = text[: len(text) - len(supervised)]
        # The border is inside the first supervised token.
        assert len(prefix) < border < len(prefix) + len(tokenizer.decode(sample.input_ids[sample.loss][:1]))
        assert text == prefix + supervised


def test_spaces_at_the_border(backend: Callable[[str], Any]) -> None:
    """With trimmed offsets a space has no text at all, and would carry no loss."""
    tokenizer = _wrap(backend("byte-level, offsets trimmed"))
    text = "you  \n x"
    (sample,) = Encoder(tokenizer).encode([rendered(text, (3, 7))])
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert any(start == stop for start, stop in offsets)
    assert tokenizer.decode(sample.input_ids[sample.loss]) == text[3:7]


def test_the_first_answer_token_is_supervised(backend: Callable[[str], Any]) -> None:
    """Field case R33: prompt "hello", reply [",", "world", "!", end]: exactly these four are targets."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["hello", ",", "world", "!", UNK, BOS, EOS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace()])
    tokenizer.add_special_tokens([UNK, BOS, EOS])
    text = f"hello,world!{EOS}"
    (sample,) = Encoder(_wrap(tokenizer)).encode([rendered(text, (5, len(text)))])
    assert sample.input_ids.tolist() == [0, 1, 2, 3, 6]
    assert sample.loss.tolist() == [False, True, True, True, True]


def test_loss_is_not_a_matter_of_the_token(backend: Callable[[str], Any]) -> None:
    """Field case R23: with the same token for padding and end of turn, both real ends are supervised."""
    tokenizer = _wrap(backend("byte-level"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    text = f"{EOS}low{EOS}now{EOS}"
    (sample,) = Encoder(tokenizer).encode([rendered(text, (4, len(text)))])
    assert np.flatnonzero(sample.input_ids == tokenizer.eos_token_id).tolist() == [0, 2, 4]
    assert sample.loss.tolist() == [False, True, True, True, True]


def test_the_first_token_is_never_a_target(backend: Callable[[str], Any]) -> None:
    """Nothing comes before it. An assistant that begins (field case R27) has loss on its own text alone."""
    encoder = Encoder(_wrap(backend("byte-level")))
    (sample, whole, empty) = encoder.encode(
        [rendered("low now", (0, 3)), rendered("low now", (0, 7)), rendered("", (0, 0))]
    )
    assert sample.loss.tolist() == [False, False]
    assert whole.loss.tolist() == [False, True]
    assert (empty.input_ids.size, empty.loss.size) == (0, 0)
    (sample,) = encoder.encode([rendered(f"x low{EOS} now", (0, 9), (9, 9))])
    assert sample.loss.tolist() == [False, True, True, True, False]


def test_nothing_is_added_cut_or_padded(backend: Callable[[str], Any]) -> None:
    """Field case R24: a template that writes BOS and a tokenizer that adds one give one BOS, at index 0. What the
    tokenizer was told of lengths before does not matter, and it is left as it was."""
    from tokenizers import Tokenizer, processors

    own = Tokenizer.from_str(backend("byte-level").to_str())
    own.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    tokenizer = _wrap(own)
    backend_tokenizer = tokenizer.backend_tokenizer
    backend_tokenizer.enable_truncation(2)
    backend_tokenizer.enable_padding(length=50)
    before = backend_tokenizer.to_str()
    text = f"{BOS}hello world"
    assert tokenizer(text)["input_ids"].count(tokenizer.bos_token_id) == 2
    (sample, short) = Encoder(tokenizer).encode([rendered(text), rendered("x")])
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert sample.input_ids.tolist() == expected
    assert np.flatnonzero(sample.input_ids == tokenizer.bos_token_id).tolist() == [0]
    assert short.input_ids.size == 1
    backend_tokenizer.enable_truncation(2)
    backend_tokenizer.enable_padding(length=50)
    assert backend_tokenizer.to_str() == before


def test_letters_that_normalisation_joins(backend: Callable[[str], Any]) -> None:
    """One token for a letter and its accent stands for both; those of a ligature for the ligature."""
    composed = _wrap(backend("byte-level, NFC"))
    text = "caf" + "e\u0301" + " x"
    for span, expected in (((4, 5), "é"), ((3, 4), "é"), ((5, 6), " "), ((2, 3), "f")):
        (sample,) = Encoder(composed).encode([rendered(text, span)])
        assert composed.decode(sample.input_ids[sample.loss]) == expected
    ligature = _wrap(backend("byte-level, NFKC"))
    (sample,) = Encoder(ligature).encode([rendered("a\ufb01b", (1, 2))])
    assert ligature.decode(sample.input_ids[sample.loss]) == "fi"


def test_letters_that_normalisation_removes_belong_to_no_token() -> None:
    from tokenizers import Tokenizer, normalizers

    own = Tokenizer.from_str(_make("byte-level").to_str())
    own.normalizer = normalizers.Replace("#", "")
    tokenizer = _wrap(own)
    (sample,) = Encoder(tokenizer).encode([rendered("a x#y#", (3, 4), (4, 5))])
    assert tokenizer.decode(sample.input_ids[sample.loss]) == "y"


def test_spaces_that_a_control_token_takes_in(backend: Callable[[str], Any]) -> None:
    """A control token with lstrip stands for the spaces before it too."""
    from tokenizers import AddedToken, Tokenizer

    own = Tokenizer.from_str(backend("byte-level").to_str())
    own.add_special_tokens([AddedToken("<m>", lstrip=True, rstrip=True)])
    tokenizer = _wrap(own)
    (sample,) = Encoder(tokenizer).encode([rendered("a  <m> x", (1, 2))])
    assert [own.id_to_token(int(number)) for number in sample.input_ids] == ["a", "<m>", "x"]
    assert sample.loss.tolist() == [False, True, False]
    text = f"a{EOS}  <m> x"
    (sample,) = Encoder(tokenizer).encode([rendered(text, find(text, "x"), literal=[(1, 5)])])
    assert tokenizer.decode(sample.input_ids, skip_special_tokens=False) == f"a{EOS}<m>x"
    assert sample.loss.tolist() == [False] * (sample.loss.size - 1) + [True]


def test_unknown_words_are_no_control_tokens() -> None:
    """The token for what is unknown is a control token, but the text does not spell it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({UNK: 0, "a": 1, "<": 2, "/": 3, "s": 4, ">": 5}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    tokenizer.add_special_tokens([UNK, EOS])
    (sample,) = Encoder(_wrap(tokenizer)).encode([rendered(f"b a {EOS} b", (2, 3), literal=[(4, 8)])])
    assert sample.input_ids.tolist() == [0, 1, 2, 3, 4, 5, 0]
    assert sample.loss.tolist() == [False, True, False, False, False, False, False]


@pytest.mark.parametrize(("text", "literal"), [("x\ud83d", None), (f"\ud83d{EOS}", [(1, 5)])])
def test_half_a_character_is_told(
    text: str, literal: list[tuple[int, int]] | None, backend: Callable[[str], Any]
) -> None:
    with pytest.raises(DataError, match="holds half of a character"):
        Encoder(_wrap(backend("byte-level"))).encode([rendered("fine"), rendered(text, literal=literal)])


def test_text_that_cannot_be_tokenised_is_told() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="missing"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(DataError, match="cannot be tokenised: WordLevel error: Missing"):
        Encoder(_wrap(tokenizer)).encode([rendered("b")])


def test_what_cannot_be_used(backend: Callable[[str], Any]) -> None:
    from tokenizers import Tokenizer

    def refusal(tokenizer: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            Encoder(tokenizer)
        assert [fault.key for fault in caught.value.faults] == ["tokenizer.name"]
        return caught.value.faults[0].message

    class Slow:
        pass

    assert refusal(Slow()).startswith("Slow does not say which text its tokens come from")
    assert "split_special_tokens" in refusal(_wrap(backend("byte-level"), split_special_tokens=True))
    description = json.loads(backend("byte-level").to_str())
    description["model"]["dropout"] = 0.1
    assert "BPE dropout" in refusal(_wrap(Tokenizer.from_str(json.dumps(description))))


def test_the_key_tells_tokenizers_apart(backend: Callable[[str], Any]) -> None:
    """Field case R44: another tokenizer or template has another key; what was said of lengths is no part of it."""
    plain, other = backend("byte-level"), backend("byte-level, NFC")
    keys = [
        Encoder(_wrap(plain, chat_template="1")).key,
        Encoder(_wrap(other, chat_template="1")).key,
        Encoder(_wrap(plain, chat_template="2")).key,
    ]
    assert len({json.dumps(key) for key in keys}) == 3
    tokenizer = _wrap(plain, chat_template="1")
    tokenizer.backend_tokenizer.enable_truncation(8)
    assert Encoder(tokenizer).key == keys[0]
