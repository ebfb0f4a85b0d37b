"""A tokenizer as the files of a Hugging Face folder, made once and written many times."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What `save_pretrained` of a tokenizer writes, chat template included."""

    files: dict[str, bytes]
    """Path relative to the folder -> content."""

    length: int
    """Number of its ids, added tokens included."""

    special_ids: dict[str, int | None]
    """bos_token_id, eos_token_id, pad_token_id."""

    def write(self, folder: Path) -> list[Path]:
        """Write them into `folder`; gives the paths."""
        paths = []
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            paths.append(path)
        return paths


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
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    return TokenizerFiles(
        files=files, length=len(tokenizer), special_ids={key: getattr(tokenizer, key) for key in special}
    )
