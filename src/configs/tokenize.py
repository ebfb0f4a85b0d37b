"""The config of `tokenize`: text to token shards. See docs/data.md, "Making shards"."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from configs.base import BaseConfig
from configs.errors import Fault


class TrainTokenizerConfig(BaseConfig):
    """`[tokenizer.train]`: a byte-level BPE trained on the documents that are not held out."""

    vocab_size: int = Field(ge=258)
    """Tokens, the 256 bytes and the special tokens included."""

    max_bytes: int = Field(default=1_000_000_000, ge=1)
    """Bytes of text that training reads, an equal share of every input file."""

    eos_token: str = Field(default="<|endoftext|>", min_length=1)
    """Ends every document; id 0."""

    pad_token: str = Field(default="<|pad|>", min_length=1)
    """Padding; id 1."""

    def table_faults(self) -> list[Fault]:
        if self.eos_token != self.pad_token:
            return []
        return [Fault(key="pad_token", message=f"is {self.pad_token!r}, as eos_token; it must be another one")]


class ShardTokenizerConfig(BaseConfig):
    """`[tokenizer]`: exactly one of `name` and `train`."""

    name: str | None = None
    """A folder or Hugging Face id. Code in it never runs."""

    train: TrainTokenizerConfig | None = None
    """Train a tokenizer first; it is written to output_dir / "tokenizer"."""


class HeldoutConfig(BaseConfig):
    """`[heldout]`: documents kept out of training, chosen by a hash of their text."""

    fraction: float = Field(default=0.01, ge=0, lt=1)
    """Share of the documents that goes to output_dir / "heldout". 0 holds none out."""

    seed: int = Field(default=0, ge=0, lt=2**64)
    """Another seed holds other documents out."""


class TokenizeConfig(BaseConfig):
    """Text to token shards."""

    positional: ClassVar[str | None] = "inputs"

    inputs: list[str] = Field(min_length=1)
    """Files (.jsonl, .jsonl.gz, .jsonl.zst, .parquet, .txt), folders of them, or one Hugging Face dataset id."""

    output_dir: Path
    """Gets the folders train, heldout and, if one is trained, tokenizer, and the file tokenize.json."""

    tokenizer: ShardTokenizerConfig = ShardTokenizerConfig()
    """Tokenizer: one that exists, or one to train."""

    heldout: HeldoutConfig = HeldoutConfig()
    """Held-out documents."""

    text_key: str = Field(default="text", min_length=1)
    """Key or column that holds a document's text."""

    subset: str | None = None
    """Subset (config name) of a Hugging Face dataset."""

    split: str = Field(default="train", min_length=1)
    """Split of a Hugging Face dataset."""

    revision: str | None = None
    """Commit, tag or branch of a Hugging Face dataset."""

    streaming: bool = True
    """Stream a Hugging Face dataset. Off: download it into the cache of `datasets` first."""

    bad_documents: Literal["error", "drop"] = "error"
    """Rows without text, lines that are no JSON, files that are not UTF-8: end with an error, or drop and count."""

    shuffle: bool = True
    """Put the documents of every shard in a random order."""

    seed: int = Field(default=0, ge=0)
    """Seed of that order."""

    num_tasks: int | None = Field(default=None, ge=1, le=100_000)
    """Parts of the work, and so shards per folder. Unset: one per 64 MiB of input files, at most 1024."""

    num_workers: int = Field(default=1, ge=1)
    """Processes. The shards are the same for any number."""

    clean: bool = False
    """Delete what an earlier `tokenize` made in output_dir, and start anew."""

    def table_faults(self) -> list[Fault]:
        if "" in self.inputs:
            return [Fault(key="inputs", message="one of them is empty; for the current folder write .")]
        if (self.tokenizer.name is None) == (self.tokenizer.train is None):
            given = "neither is" if self.tokenizer.name is None else "both are"
            message = f"needs one of tokenizer.name and tokenizer.train.vocab_size; {given} given"
            return [Fault(key="tokenizer", message=message)]
        return []
