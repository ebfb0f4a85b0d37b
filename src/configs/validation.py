"""`[val]`: held-out likelihood on the live weights; see docs/validation.md."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from configs.base import BaseConfig


class ValSetConfig(BaseConfig):
    """One held-out set."""

    name: str = Field(min_length=1, pattern=r"^[\w.-]+$")
    """Name in the metrics."""

    path: Path
    """A folder of token shards."""


class ValConfig(BaseConfig):
    """`[val]`"""

    interval: int | None = Field(None, ge=1)
    """Validate after every interval-th step."""

    eval_on_start: bool = False
    """Also validate before the first step."""

    eval_on_end: bool = False
    """Also validate after the last step's checkpoint."""

    data_dir: Path | None = None
    """Folder in which sets given by name alone lie."""

    sets: list[str | ValSetConfig] = Field(min_length=1)
    """Held-out sets: a name in data_dir, or {name, path}."""

    seq_lens: list[int] = Field(default=[2048], min_length=1)
    """Window lengths; each set is scored at each of them."""

    micro_batch_tokens: int = Field(16384, ge=1)
    """Tokens per forward pass and rank. No result depends on it."""

    context: Literal["none", "prefix"] = "none"
    """`none`: a window's first token is not scored. `prefix`: one BOS/EOS token before each window, every token scored."""
