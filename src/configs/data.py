"""`[data]`: a union on `type`. Every type gives the same rows; see docs/data.md."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from configs.base import BaseConfig
from configs.errors import Fault
from configs.model import is_hub_id

_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".csv", ".txt", ".gz", ".zst", ".zip")
_SUM_TOLERANCE = 1e-6

LONGEST_ROW = 1 << 24
"""Tokens: buffers of rows and plans grow with it, and far more is a slip of the keyboard."""

Packing = Literal["best_fit", "sequential", "none"]
Overflow = Literal["truncate", "drop", "split", "error"]
StoppingStrategy = Literal["first_exhausted", "all_exhausted"]


def is_dataset_id(name: str) -> bool:
    """Whether `name`, where no file or folder has it, can be a dataset's id on the Hugging Face hub."""
    return is_hub_id(name) and not name.lower().endswith(_FILE_SUFFIXES)


class RowsConfig(BaseConfig):
    """What all data types share."""

    seq_len: int = Field(default=2048, ge=2, le=LONGEST_ROW)
    """Tokens per row."""

    batch_size: int = Field(default=128, ge=1)
    """Rows per optimizer step, over all ranks."""

    micro_batch_size: int = Field(default=1, ge=1)
    """Rows per rank and micro-batch."""

    num_workers: int = Field(default=2, ge=0)
    """Threads that fill batches ahead; 0 fills them in the training thread. The rows are the same for any number."""

    seed: int = Field(default=0, ge=0)
    """Seed of the order of rows."""

    shuffle: bool = True
    """Read the rows of each epoch in a random order, new every epoch."""

    max_epochs: int | None = Field(default=None, ge=1)
    """Bound on the planned passes over the data. With `max_steps` unset, the run takes all steps that fit in it."""

    def table_faults(self) -> list[Fault]:
        if self.batch_size % self.micro_batch_size == 0:
            return []
        message = f"{self.batch_size} is not a multiple of micro_batch_size = {self.micro_batch_size}"
        return [Fault(key="batch_size", message=message)]


class TokensDataConfig(RowsConfig):
    """`type = "tokens"`: token shards written by datatrove's DocumentTokenizer (or `tokenize`)."""

    type: Literal["tokens"]

    paths: list[Path] = Field(min_length=1)
    """Folders of `.ds` shards, or single shards, read as one pool in this order."""

    document_masking: bool = True
    """Attention and positions stay inside each document. Off: inside each row."""


class FakeDataConfig(RowsConfig):
    """`type = "fake"`: made-up tokens through the same path, for tests and speed."""

    type: Literal["fake"]

    length: Literal["fixed", "variable"] = "fixed"
    """`fixed`: one document fills each row. `variable`: documents of random lengths."""

    input_ids: Literal["increasing", "random"] = "increasing"
    """`increasing`: 0, 1, 2, ... modulo the vocabulary, starting anywhere. `random`: uniform ids."""

    num_rows: int = Field(default=1_000_000, ge=1)
    """Rows in an epoch."""


class NoDataConfig(RowsConfig):
    """`type = "none"`: no training data, for `max_steps = 0`, which then may also go without the table."""

    type: Literal["none"]


class LossMaskConfig(BaseConfig):
    """`[data.loss_mask]`: whose messages carry loss. A message's own `train` or `weight` of 0 or 1 goes before it."""

    system: bool = False
    """System and developer messages."""

    user: bool = False
    """User messages."""

    assistant: bool = True
    """Assistant messages, tool calls and the end of the turn included."""

    tool: bool = False
    """Results of tools."""


@dataclass(frozen=True, kw_only=True)
class ChatPart:
    """One part of the conversations: a file, a folder, or a split of a dataset."""

    name: str
    subset: str | None
    split: str | None


class ChatConfig(BaseConfig):
    """Which conversations, and what of them carries loss: the same for training and validation."""

    name: str | list[str] = Field(min_length=1)
    """A `.jsonl` or `.parquet` file, a folder of them or one saved by `datasets`, or a dataset's id on the Hugging Face
    hub; or several of these."""

    subsets: list[str | None] | None = Field(default=None, min_length=1)
    """Configurations of the dataset, one per part of the data. One of `name`, `subsets` and `splits` may be shorter: a
    single value holds for all parts."""

    splits: list[str] | None = Field(default=None, min_length=1)
    """Splits of the dataset, one per part of the data. Unset: "train" where there are splits."""

    loss_mask: LossMaskConfig = LossMaskConfig()
    """Roles whose messages carry loss."""

    last_turn_only: bool = False
    """Of the messages that carry loss only the last one does."""

    packing: Packing = "best_fit"
    """How samples share rows. `best_fit`: least padding. `sequential`: in the order of the data. `none`: one each."""

    overflow: Overflow = "truncate"
    """Samples longer than a row: cut to its length, left out, cut into several, or refused."""

    cache_dir: Path | None = None
    """Where tokenised conversations are kept. Unset: `.cache/chats` under output_dir."""

    cache_workers: int | None = Field(default=None, ge=1)
    """Processes that tokenise. Unset: one per CPU core."""

    @property
    def parts(self) -> list[ChatPart]:
        """The parts in their order."""
        columns = [self._names, self.subsets or [None], self.splits or [None]]
        num_parts = max(map(len, columns))
        names, subsets, splits = (column * num_parts if len(column) == 1 else column for column in columns)
        return [
            ChatPart(name=str(name), subset=subset, split=split)
            for name, subset, split in zip(names, subsets, splits, strict=True)
        ]

    @property
    def _names(self) -> list[str]:
        return [self.name] if isinstance(self.name, str) else self.name

    def table_faults(self) -> list[Fault]:
        faults = super().table_faults()
        for key, values in (("name", self._names), ("subsets", self.subsets or []), ("splits", self.splits or [])):
            if "" in values:
                faults.append(Fault(key=key, message="one of them is empty"))
        lengths = {"name": len(self._names), "subsets": len(self.subsets or [0]), "splits": len(self.splits or [0])}
        several = {key: length for key, length in lengths.items() if length > 1}
        if len(set(several.values())) > 1:
            given = " and ".join(f"{key} has {length}" for key, length in several.items())
            message = f"{given} entries: give one per part of the data, or one for all parts"
            faults.append(Fault(key=list(several)[-1], message=message))
        return faults


class SFTDataConfig(ChatConfig, RowsConfig):
    """`type = "sft"`, the default: conversations, rendered by the tokenizer's chat template."""

    type: Literal["sft"] = "sft"

    probabilities: list[Annotated[float, Field(gt=0)]] | None = Field(default=None, min_length=1)
    """Share of samples that each part gives, summing to 1. Unset: every sample of every part once per epoch."""

    stopping_strategy: StoppingStrategy = "all_exhausted"
    """With `probabilities`: an epoch ends when the first part has no sample left, or when each had all of its samples
    drawn, those of smaller parts several times."""

    def table_faults(self) -> list[Fault]:
        faults = super().table_faults()
        if self.probabilities is None:
            # The default cannot be told from what was given: a config is read back with all of its fields.
            if self.stopping_strategy == "first_exhausted":
                message = '"first_exhausted" does nothing without probabilities; give those too, or leave it out'
                faults.append(Fault(key="stopping_strategy", message=message))
            return faults
        if faults:
            return faults
        if len(self.probabilities) != len(self.parts):
            message = f"has {len(self.probabilities)} entries, the data {len(self.parts)} parts; give one for each part"
            faults.append(Fault(key="probabilities", message=message))
        elif abs(sum(self.probabilities) - 1) > _SUM_TOLERANCE:
            message = f"their sum is {sum(self.probabilities):.7g}, not 1"
            faults.append(Fault(key="probabilities", message=message))
        return faults


DataConfig = Annotated[SFTDataConfig | TokensDataConfig | FakeDataConfig | NoDataConfig, Field(discriminator="type")]
