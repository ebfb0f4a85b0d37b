"""`[val]`: held-out likelihood on the live weights; see docs/validation.md."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from configs.base import BaseConfig
from configs.errors import Fault

SetName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
"""A name in the metrics, and of a folder: never a path."""


class ValSetConfig(BaseConfig):
    """One held-out set."""

    name: SetName
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

    sets: list[SetName | ValSetConfig] = Field(min_length=1)
    """Held-out sets: a name in data_dir, or {name, path}."""

    seq_lens: list[Annotated[int, Field(ge=2)]] = Field(default=[2048], min_length=1)
    """Window lengths; each set is scored at each of them."""

    micro_batch_tokens: int = Field(16384, ge=1)
    """Tokens per forward pass and rank. No result depends on it."""

    context: Literal["none", "prefix"] = "none"
    """`none`: a window's first token is not scored. `prefix`: one BOS/EOS token before each window, every token scored."""

    @model_validator(mode="after")
    def _metrics_have_one_meaning(self) -> "ValConfig":
        names = [entry if isinstance(entry, str) else entry.name for entry in self.sets]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"sets: {name!r} is named twice")
        if len(set(self.seq_lens)) < len(self.seq_lens) or min(self.seq_lens) < 2:
            raise ValueError(f"seq_lens = {self.seq_lens}: lengths must differ, and be 2 or more")
        return self

    @model_validator(mode="after")
    def _sets_are_somewhere(self) -> "ValConfig":
        named = [entry for entry in self.sets if isinstance(entry, str)]
        if named and self.data_dir is None:
            raise ValueError(f"sets: {named[0]!r} is a name in data_dir, which is not set")
        return self

    @model_validator(mode="after")
    def _windows_fit_in_a_forward_pass(self) -> "ValConfig":
        if self.micro_batch_tokens < max(self.seq_lens):
            raise ValueError(
                f"micro_batch_tokens = {self.micro_batch_tokens} is less than the longest window, {max(self.seq_lens)}"
            )
        return self
