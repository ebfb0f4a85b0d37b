"""`[data]`: a union on `type`. Every type gives the same rows; see docs/data.md."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from configs.base import BaseConfig
from configs.errors import Fault


class RowsConfig(BaseConfig):
    """What all data types share."""

    seq_len: int = Field(default=2048, ge=2)
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


DataConfig = Annotated[TokensDataConfig | FakeDataConfig, Field(discriminator="type")]
