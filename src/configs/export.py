"""The config of `export-hf`: `ExportConfig`."""

import re
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from configs.base import BaseConfig
from configs.checks import check_folder
from configs.errors import Fault

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class ExportTokenizerConfig(BaseConfig):
    """`[tokenizer]` of an export."""

    name: str | None = None
    """A folder or Hugging Face id. Unset: the tokenizer that the run had. Code in it never runs."""


class ExportConfig(BaseConfig):
    """Write a checkpoint as a Hugging Face folder: safetensors, config, tokenizer."""

    positional: ClassVar[str | None] = "checkpoint"

    checkpoint: Path
    """A checkpoint (`.../checkpoints/step_N`), or a run directory: then its newest whole one, or that of `--step`."""

    step: int | None = Field(default=None, ge=0)
    """Step of the checkpoint, where a run directory is given."""

    output_dir: Path | None = None
    """Folder to write. Unset: <run_dir>/exports/step_N, or step_N_merged with `merge`."""

    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Dtype of the weights. Unset: that in which the run computed, as a rule bfloat16. Masters are kept in float32."""

    max_shard_size: str = "5GB"
    """Larger models are cut into files of at most this many bytes: a number with KB, MB, GB, TB, KiB, MiB, GiB or
    without unit."""

    tokenizer: ExportTokenizerConfig = ExportTokenizerConfig()
    """Tokenizer to write beside the weights."""

    merge: bool = False
    """Of a checkpoint of adapters: add them to the weights of their base and write a whole model, not files of peft."""

    base: str | None = None
    """Of a checkpoint of adapters: folder or Hugging Face id of their base, where it has moved since. It must hold the
    same weights."""

    clean: bool = False
    """Replace the folder if it is there and holds an earlier export."""

    @property
    def max_shard_bytes(self) -> int:
        """`max_shard_size` as a number."""
        return _bytes_of(self.max_shard_size) or 0

    def table_faults(self) -> list[Fault]:
        if not _bytes_of(self.max_shard_size):
            message = f"{self.max_shard_size!r} is no size; write a number of at least 1 and a unit: 5GB, 500MB, 2GiB"
            return [Fault(key="max_shard_size", message=message)]
        return []

    def run_faults(self) -> list[Fault]:
        return check_folder("checkpoint", self.checkpoint)


def _bytes_of(text: str) -> int | None:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        return None
    return int(float(match[1]) * _UNITS[match[2].upper()])
