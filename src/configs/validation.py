"""`[val]`: held-out likelihood on the live weights; see docs/validation.md."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from configs.base import BaseConfig, PlainName
from configs.data import LONGEST_ROW, ChatConfig
from configs.errors import Fault

SET_ENDINGS = ("", ".jsonl", ".jsonl.gz", ".json", ".parquet")
"""What follows the name of a set in `val.data_dir`: nothing where it is a folder."""


class ValSetConfig(BaseConfig):
    """One held-out set."""

    name: PlainName
    """Name in the metrics."""

    path: Path
    """A folder of token shards; or rows of text: a `.jsonl` or `.parquet` file, or a folder of them. The columns say
    what kind of set it is."""

    seq_lens: list[Annotated[int, Field(ge=2)]] | None = Field(default=None, min_length=1)
    """Window lengths of this set. Unset: those of all sets."""

    max_documents: int | None = Field(default=None, ge=1)
    """Score the first so many documents only. Unset: all."""


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


class SuiteConfig(BaseConfig):
    """What a round of validation scores, and how."""

    data_dir: Path | None = None
    """Folder in which sets given by name alone lie: as a folder, or NAME with .jsonl, .jsonl.gz, .json or .parquet."""

    data: ValChatConfig | None = None
    """Held-out conversations: `val/loss` and `val/perplexity` over their loss tokens."""

    sets: list[PlainName | ValSetConfig] = Field(default=[])
    """Held-out sets of text: a name in data_dir, or {name, path}."""

    seq_lens: list[Annotated[int, Field(ge=2)]] = Field(default=[2048], min_length=1)
    """Window lengths; each set is scored at each of them."""

    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens per forward pass and rank. No result depends on it."""

    context: Literal["none", "prefix"] = "none"
    """`none`: nothing is put before a text, and a window's first token is not scored. `prefix`: every token is scored,
    the first of a document after one BOS or EOS token, as lm-evaluation-harness does."""

    save_arrays: bool = False
    """Write a parquet file per set and step with one record for each document; see docs/validation.md."""

    cache_dir: Path | None = None
    """Folder of tokenised sets. Unset: output_dir/.cache/val."""

    @property
    def row_lengths(self) -> dict[str, list[int]]:
        """Tokens of the rows that the model will see, by the key that gives them."""
        lengths: dict[str, list[int]] = {} if self.data is None else {"val.data.seq_len": [self.data.seq_len]}
        for entry in self.sets:
            own = not isinstance(entry, str) and entry.seq_lens is not None
            lengths.setdefault("val.sets" if own else "val.seq_lens", []).extend(self.seq_lens_of(entry))
        return lengths

    @property
    def longest_row(self) -> int:
        """Tokens of the longest of them."""
        return max((length for lengths in self.row_lengths.values() for length in lengths), default=2)

    def seq_lens_of(self, entry: str | ValSetConfig) -> list[int]:
        """Window lengths of a set."""
        own = None if isinstance(entry, str) else entry.seq_lens
        return self.seq_lens if own is None else own

    def table_faults(self) -> list[Fault]:
        faults = []
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
        own = [("sets", entry.seq_lens) for entry in self.sets if isinstance(entry, ValSetConfig) and entry.seq_lens]
        for key, lengths in [("seq_lens", self.seq_lens), *own]:
            if len(set(lengths)) < len(lengths):
                faults.append(Fault(key=key, message=f"{lengths}: each length once"))
        longest = max((length for entry in self.sets for length in self.seq_lens_of(entry)), default=0)
        if self.micro_batch_tokens < longest:
            message = f"{self.micro_batch_tokens} tokens do not hold the longest window, {longest}"
            faults.append(Fault(key="micro_batch_tokens", message=message))
        return faults


class ValConfig(SuiteConfig):
    """`[val]`"""

    interval: int | None = Field(default=None, ge=1)
    """Validate after every interval-th step."""

    eval_on_start: bool = False
    """Also validate before the first step."""

    eval_on_end: bool = False
    """Also validate after the last step's checkpoint."""
