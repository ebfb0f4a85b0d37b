"""Loading of the run's tokenizer."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import ConfigError
from configs.model import is_hub_id
from trainer.text import first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What tokenizers, configs of models and generation configs call the ids of control tokens."""


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int | None]:
    """Ids by the names of SPECIAL_IDS; None for those that the tokenizer lacks."""
    return {name: getattr(tokenizer, name) for name in SPECIAL_IDS}


def num_ids(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Rows that an embedding needs: the largest id and one more, which is more than the length where ids have gaps."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))


def control_ids(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Tokens that stand for no text."""
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {id_ for id_, token in added.items() if token.special}


def decoder_parts(tokenizer: "PreTrainedTokenizerBase") -> list[dict[str, Any]] | None:
    """What the decoder is put together from, which says how tokens spell text; None without a `tokenizers` form."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    # Its state is the JSON of the decoder alone: writing out the whole tokenizer takes half a second.
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def plain_copy(backend: "Tokenizer") -> "Tokenizer":
    """One that only tokenises: nothing is cut, padded or added, and no offset is trimmed.

    Raises:
        ConfigError: it cannot be copied, or gives other tokens each time.
    """
    from tokenizers import Tokenizer

    key = "tokenizer.name"
    try:
        copy = Tokenizer.from_str(backend.to_str())
    except Exception as error:  # a part written in Python
        raise ConfigError.one(key, f"the tokenizer cannot be copied: {first_line(error)}") from error
    if getattr(copy.model, "dropout", None):
        raise ConfigError.one(key, "the tokenizer has BPE dropout: it gives other tokens each time")
    copy.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
    copy.no_truncation()
    copy.no_padding()
    return copy


def load_tokenizer(name: str, key: str = "tokenizer.name") -> "PreTrainedTokenizerBase":
    """The tokenizer in a folder or, by id, on the Hugging Face hub. Code that lies beside it never runs.

    Args:
        name: folder or id.
        key: where a fault is reported.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    # transformers takes seconds to import, and a config fault elsewhere should show before that.
    from transformers import AutoTokenizer

    try:
        folder = Path(name).is_dir()
    except OSError as error:
        raise ConfigError.one(key, f"{name} cannot be read: {error.strerror}") from error
    if not folder and not is_hub_id(name):
        raise ConfigError.one(key, f"there is no folder {name}")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise every kind, plain Exception among them
        place = f"the folder {name}" if folder else f"the hub as {name!r} (there is no such folder here)"
        reason = first_line(error).removesuffix(" from one of:")  # a list follows that helps nobody
        if folder and not Path(name, "tokenizer.json").exists():
            reason = f"it holds no tokenizer.json ({reason})"
        raise ConfigError.one(key, f"no tokenizer could be loaded from {place}: {reason}") from error
