"""Loading of the run's tokenizer."""

from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """The tokenizer in a folder or, by id, on the Hugging Face hub. Code that lies beside it never runs.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    # transformers takes seconds to import, and a config fault elsewhere should show before that.
    from transformers import AutoTokenizer

    folder = Path(name).is_dir()
    if not folder and (Path(name).is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise ConfigError.one("tokenizer.name", f"there is no folder {name}")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise every kind, plain Exception among them
        lines = str(error).strip().splitlines()
        cause = lines[0] if lines else type(error).__name__
        place = f"the folder {name}" if folder else f"the hub as {name!r} (there is no such folder here)"
        raise ConfigError.one("tokenizer.name", f"no tokenizer could be loaded from {place}: {cause}") from error
