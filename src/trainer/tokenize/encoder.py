"""The tokenizer as tasks use it: what transformers loads for `sft`, checked to be fit for shards."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import ConfigError
from trainer.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UINT16_IDS = 2**16


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A tokenizer and what shards need to know of it."""

    name: str
    """For the shards' metadata: a hub id or the last part of a folder, never a path of this machine."""

    json: str
    """Of the tokenizers library."""

    eos_token: str
    eos_id: int
    width: int
    """Bytes per token in the shards: 2 where all ids are below 65,536, else 4."""

    vocab_size: int
    control_tokens: tuple[str, ...]
    """Texts of the special tokens."""

    @property
    def digest(self) -> str:
        return sha256(f"{self.eos_id} {self.json}".encode()).hexdigest()


def build_encoder(name: str, *, shown_name: str | None = None) -> Encoder:
    """The tokenizer of a folder or hub id.

    Args:
        shown_name: what the metadata say in place of the name.

    Raises:
        ConfigError: it cannot be loaded, has no fast form or no EOS, or cannot keep text apart from control tokens.
    """
    tokenizer = load_tokenizer(name)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError.one("tokenizer.name", f"{name} has no tokenizer.json, which datatrove needs")
    vocabulary = backend.get_vocab(with_added_tokens=True)
    eos_token = tokenizer.eos_token
    if not isinstance(eos_token, str) or eos_token not in vocabulary:
        raise ConfigError.one("tokenizer.name", f"the tokenizer {name} has no end-of-text token (eos_token)")
    special = {token.content: number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    special[eos_token] = vocabulary[eos_token]
    spelled = _find_spelled(configure(backend), special, unknown=getattr(tokenizer, "unk_token", None))
    if spelled:
        message = (
            f"the tokenizer {name} makes a control token of the text {spelled}, and cannot be told not to: "
            "text could end a document"
        )
        raise ConfigError.one("tokenizer.name", message)
    return Encoder(
        name=" ".join((shown_name or _shown(name)).split()),
        json=backend.to_str(),
        eos_token=eos_token,
        eos_id=vocabulary[eos_token],
        width=2 if max(vocabulary.values()) < UINT16_IDS else 4,
        vocab_size=len(vocabulary),
        control_tokens=tuple(sorted(special)),
    )


def configure(backend: "Tokenizer") -> "Tokenizer":
    """For whole documents of plain text: nothing cut or padded, and text that spells a special token stays text."""
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def _shown(name: str) -> str:
    return Path(name).resolve().name if Path(name).is_dir() else name


def _find_spelled(backend: "Tokenizer", special: dict[str, int], *, unknown: str | None) -> str | None:
    """A special token that its own text becomes, though it should be split."""
    for token, number in sorted(special.items()):
        texts = [token, f"a {token} b", f"a{token}b"]
        try:
            encodings = backend.encode_batch(texts, add_special_tokens=False)
        except Exception:  # tokenizers raises plain Exception; text that cannot be encoded becomes no token at all
            continue
        if token != unknown and any(number in encoding.ids for encoding in encodings):
            return token
    return None
