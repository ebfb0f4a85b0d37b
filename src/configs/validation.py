"""`[val]`: held-out likelihood on the live weights; see docs/validation.md."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from configs.base import BaseConfig, PlainName
from configs.data import LONGEST_ROW, ChatConfig
from configs.errors import Fault


class ValSetConfig(BaseConfig):
    """One held-out set."""

    name: PlainName
    """Name in the metrics."""

    path: Path
    """A folder of token shards."""


class ValChatConfig(ChatConfig):
    """`[val.data]`: conversations scored whole, each once per round."""

    type: Literal["sft"] = "sft"

    seq_len: int = Field(default=2048, ge=2, le=LONGEST_ROW)
    """Tokens per row."""

    micro_batch_size: int = Field(default=1, ge=1)
    """Rows per rank and forward pass. No result depends on it."""

    batch_size: int = Field(default=128, ge=1)
    """For tables copied from `[data]`, as `shuffle` and `seed`: a round scores all samples, so nothing depends on
    them."""

    shuffle: bool = False
    """Changes nothing."""

    seed: int = Field(default=0, ge=0)
    """Changes nothing."""


class ValConfig(BaseConfig):
    """`[val]`"""

    interval: int | None = Field(default=None, ge=1)
    """Validate after every interval-th step."""

    eval_on_start: bool = False
    """Also validate before the first step."""

    eval_on_end: bool = False
    """Also validate after the last step's checkpoint."""

    data_dir: Path | None = None
    """Folder in which sets given by name alone lie."""

    data: ValChatConfig | None = None
    """Held-out conversations: `val/loss` and `val/perplexity` over their loss tokens."""

    sets: list[PlainName | ValSetConfig] = Field(default=[])
    """Held-out sets of text: a name in data_dir, or {name, path}."""

    seq_lens: list[Annotated[int, Field(ge=2)]] = Field(default=[2048], min_length=1)
    """Window lengths; each set is scored at each of them."""

    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens per forward pass and rank. No result depends on it."""

    context: Literal["none", "prefix"] = "none"
    """`none`: a window's first token is not scored. `prefix`: one BOS or EOS token before each window, and every
    token is scored."""

    def table_faults(self) -> list[Fault]:
        faults = []
        if self.interval is None and not self.eval_on_start and not self.eval_on_end:
            message = "is missing: nothing says when to validate; set it, eval_on_start or eval_on_end"
            faults.append(Fault(key="interval", message=message))
        if self.data is None and not self.sets:
            message = "is missing: nothing says what to validate on; give sets, [val.data] or both"
            faults.append(Fault(key="sets", message=message))
        names = [entry if isinstance(entry, str) else entry.name for entry in self.sets]
        for name in sorted({name for name in names if names.count(name) > 1}):
            faults.append(Fault(key="sets", message=f"{name!r} is named twice"))
        if self.data_dir is None:
            for entry in self.sets:
                if isinstance(entry, str):
                    faults.append(Fault(key="sets", message=f"{entry!r} is a name in data_dir, which is not set"))
        if len(set(self.seq_lens)) < len(self.seq_lens):
            faults.append(Fault(key="seq_lens", message=f"{self.seq_lens}: each length once"))
        if self.sets and self.micro_batch_tokens < max(self.seq_lens):
            message = f"{self.micro_batch_tokens} tokens do not hold the longest window, {max(self.seq_lens)}"
            faults.append(Fault(key="micro_batch_tokens", message=message))
        return faults
