"""A tokenizer as the files of a Hugging Face folder, made once and written many times."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.files import write_whole
from trainer.tokenizer import load_tokenizer, special_ids


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What `save_pretrained` of a tokenizer writes, chat template included."""

    files: dict[str, bytes]
    """Path relative to the folder -> content."""

    length: int
    """Number of its ids, added tokens included."""

    special_ids: dict[str, int | None]
    """See trainer.tokenizer.special_ids."""

    def write(self, folder: Path) -> None:
        """Write them into `folder`."""
        for name, content in self.files.items():
            write_whole(folder / name, content)


def read_tokenizer(name: str) -> TokenizerFiles:
    """The files of the tokenizer in a folder or, by id, on the Hugging Face hub.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    tokenizer: Any = load_tokenizer(name)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(Path(folder).rglob("*"))
            if path.is_file()
        }
    return TokenizerFiles(files=files, length=len(tokenizer), special_ids=special_ids(tokenizer))
