"""Small tokenizers of every family that held-out text may come in, and sets of hand-written rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trainer.data.row import untracked
from trainer.validation.sets.text_encoder import TextEncoder
from trainer.validation.sets.text_set import Prefix, TextSet
from trainer.validation.token_bytes import token_bytes

BOS = "<|bos|>"
PIECES = ["▁the", "▁a", "th", "he", "東", "京", "é", "n", "e", "t", "h", "a", " ", "▁"]


def byte_level(normalizer: Any = None, *, prefix_space: bool = False, adds_bos: bool = False) -> Tokenizer:
    """Letters for bytes, and merges that cross words and cut characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("Ġ", "th"), ("Ġth", "e"), ("ð", "Ł"), ("æ", "Ŀ"), ("Ċ", "Ċ"), ("Ġ", "Ġ"), ("n", "Ġ")]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([BOS])
    if adds_bos:
        bos = (BOS, tokenizer.token_to_id(BOS))
        tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", f"{BOS} $A $B", [bos])
    return tokenizer


def sentencepiece(*, normalizer: Any = None, pre_tokenizer: Any = None, strip: bool = True) -> Tokenizer:
    """▁ for a space, <0xNN> for bytes of characters that are no piece."""
    pieces = [piece.replace(" ", "▁") for piece in PIECES]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ["<unk>", "<s>", *pieces]:
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("t", "h"), ("h", "e"), ("▁", "a"), ("▁", "the")]
    vocabulary["the"] = len(vocabulary)
    merges.insert(1, ("th", "e"))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * strip)
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    pieces += [(piece.replace(" ", "▁"), -2.0) for piece in dict.fromkeys(PIECES) if piece != " "]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def build_tokenizer(family: str) -> PreTrainedTokenizerBase:
    mark: Any = normalizers.Replace(" ", "▁")
    match family:
        case "bytes of ByT5":
            return ByT5Tokenizer()
        case "byte-level BPE":
            raw = byte_level()
        case "byte-level BPE that adds BOS":
            raw = byte_level(adds_bos=True)
        case "byte-level BPE, NFC":
            raw = byte_level(normalizers.NFC())
        case "byte-level BPE, prefix space":
            raw = byte_level(prefix_space=True)
        case "SentencePiece, no space":
            raw = sentencepiece(normalizer=mark, strip=False)
        case "SentencePiece, Prepend":
            raw = sentencepiece(normalizer=normalizers.Sequence([normalizers.Prepend("▁"), mark]))
        case "SentencePiece, Prepend and NFC":
            raw = sentencepiece(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("▁"), mark]))
        case "SentencePiece, Metaspace always":
            raw = sentencepiece(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always", split=False))
        case "SentencePiece, Metaspace first":
            raw = sentencepiece(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first"))
        case "Unigram":
            raw = unigram()
        case _:
            raise ValueError(family)
    control = {"bos_token": BOS} if family.startswith("byte-level") else {"unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **control)


FAMILIES = (
    "bytes of ByT5",
    "byte-level BPE",
    "byte-level BPE that adds BOS",
    "byte-level BPE, NFC",
    "byte-level BPE, prefix space",
    "SentencePiece, no space",
    "SentencePiece, Prepend",
    "SentencePiece, Prepend and NFC",
    "SentencePiece, Metaspace always",
    "SentencePiece, Metaspace first",
    "Unigram",
)


@pytest.fixture(params=FAMILIES)
def any_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return build_tokenizer(request.param)


@pytest.fixture
def tokenizer_of() -> Callable[[str], PreTrainedTokenizerBase]:
    """By the name of its family."""
    return build_tokenizer


@pytest.fixture
def make_set(tmp_path: Path) -> Callable[..., TextSet]:
    """Writes rows to a file, or takes the path that is given, and opens the set."""

    def make(
        rows: list[dict[str, Any]] | Path,
        *,
        family: str = "byte-level BPE",
        tokenizer: PreTrainedTokenizerBase | None = None,
        prefix_id: int | None = None,
        always: bool = False,
        vocab_size: int = 512,
        **options: Any,
    ) -> TextSet:
        path = rows if isinstance(rows, Path) else tmp_path / "rows.jsonl"
        if not isinstance(rows, Path):
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        tokenizer = tokenizer or build_tokenizer(family)
        return TextSet(
            "set",
            path,
            encoder=TextEncoder(tokenizer),
            byte_counts=token_bytes(tokenizer, 512)[:vocab_size],
            prefix=None if prefix_id is None else Prefix(id=prefix_id, always=always),
            cache_dir=tmp_path / "cache",
            **{"track": untracked, **options},
        )

    return make
