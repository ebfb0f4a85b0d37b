"""From a checkpoint to a Hugging Face folder; `export-hf` and `ckpt.weights` both end here. See docs/checkpoints.md."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from trainer.checkpoint.agreement import describe
from trainer.checkpoint.manifest import file_records, read_checkpoint, wrong_content
from trainer.checkpoint.model_record import ModelRecord
from trainer.checkpoint.safe_reader import DamagedError
from trainer.checkpoint.tensor_reader import TensorReader
from trainer.errors import RunError
from trainer.files import make_empty, rename_over, require_space, sync, write_whole
from trainer.weights.adapter_files import write_adapters
from trainer.weights.card import write_config, write_generation_config
from trainer.weights.tokenizer_files import TokenizerFiles
from trainer.weights.write import TensorEntry, can_write, write_safetensors

MARK_NAME = "oneloop.json"
"""Says that a folder is an export, and of what."""

MODEL_PREFIX = "model."
"""Beginning of the names of the model's tensors in a checkpoint."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, kw_only=True)
class Export:
    """A checkpoint that was read and checked as far as its metadata, and what it will become."""

    path: Path
    step: int
    record: ModelRecord
    manifest: dict[str, Any]
    metadata: Metadata
    entries: list[TensorEntry]
    """Names without the prefix, in natural order."""

    dtype: str

    @property
    def num_params(self) -> int:
        return sum(torch.Size(entry.shape).numel() for entry in self.entries)

    @property
    def num_bytes(self) -> int:
        """Of the tensors."""
        return sum(entry.num_bytes for entry in self.entries)


def plan_export(path: Path, dtype: str | None) -> Export:
    """Read what a checkpoint says about itself.

    Args:
        dtype: name of the dtype of floating-point tensors; None is that of the run's forward pass. Other tensors keep
            theirs.

    Raises:
        RunError: it is damaged, or holds no model that can be exported.
    """
    try:
        manifest, metadata = read_checkpoint(path)
        record = ModelRecord.of(manifest["state"])
        dtype = dtype or record.export_dtype
        if dtype not in DTYPES:
            raise RunError(f"dtype {dtype} is not one of {', '.join(DTYPES)}")
        reader = TensorReader(path, metadata)
        names = sorted((name for name in reader.names if name.startswith(MODEL_PREFIX)), key=_natural)
        entries = [
            TensorEntry(
                name=name.removeprefix(MODEL_PREFIX),
                shape=reader.shape(name),
                dtype=DTYPES[dtype] if reader.dtype(name).is_floating_point else reader.dtype(name),
            )
            for name in names
        ]
        if not entries:
            raise RunError("it holds no tensors of a model")
        for entry in entries:
            if not can_write(entry.dtype):
                raise RunError(f"{entry.name} is {entry.dtype}, which safetensors files do not hold")
    except (DamagedError, RunError) as error:
        raise RunError(f"checkpoint {path} cannot be exported: {error}") from error
    return Export(
        path=path,
        step=manifest["step"],
        record=record,
        manifest=manifest,
        metadata=metadata,
        entries=entries,
        dtype=dtype,
    )


def check_content(export: Export) -> None:
    """Compare every file of the checkpoint with its checksum.

    Raises:
        RunError: one is damaged.
    """
    reason = wrong_content(export.path, file_records(export.manifest))
    if reason is not None:
        raise RunError(f"checkpoint {export.path} cannot be exported: {reason}")


def write_export(
    export: Export,
    target: Path,
    tokenizer: TokenizerFiles | None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write a model, or adapters where the checkpoint holds these. The folder has its name only once all of it is on
    disk; killed before, a hidden one is left.

    Args:
        target: replaced if it is there: the caller has seen to it that it may be.
        tokenizer: written too.
        max_shard_bytes: larger models are cut into several files.
        on_progress: told how many bytes of tensors are written.

    Raises:
        RunError: it cannot be written (a full disk, say), or a number does not fit the dtype. Nothing is left then.
    """
    source = TensorSource(export)

    def fill(folder: Path) -> None:
        adapters = export.record.adapters
        if adapters is not None:
            write_adapters(folder, adapters, export.entries, source.read, on_progress=on_progress)
            return
        write_safetensors(folder, export.entries, source.read, max_shard_bytes=max_shard_bytes, on_progress=on_progress)
        write_model_configs(folder, export, tokenizer)

    write_folder(export, target, tokenizer, fill)


def write_folder(
    export: Export,
    target: Path,
    tokenizer: TokenizerFiles | None,
    fill: Callable[[Path], None],
    note: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a folder that has its name only once all of it is on disk: what `fill` puts in, tokenizer, mark.

    Args:
        export: tells the bytes for which there must be space, and what the mark says.
        fill: given the folder under its temporary name.
        note: what the mark says besides step, run and dtype.

    Raises:
        RunError: as `write_export`.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        require_space(
            target.parent,
            export.num_bytes + 2**20 + sum(len(content) for content in (tokenizer.files if tokenizer else {}).values()),
            "an export",
        )
        make_empty(temporary)
        fill(temporary)
        if tokenizer is not None:
            tokenizer.write(temporary)
        mark = {"step": export.step, "run": export.path.absolute().parents[1].name, "dtype": export.dtype, **note}
        write_whole(temporary / MARK_NAME, (json.dumps(mark, indent=2) + "\n").encode())
        sync(temporary)
        replaced = rename_over(temporary, target)
        if replaced is not None:
            shutil.rmtree(replaced)
    except (OSError, RunError) as error:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk should not stay full of it
        raise RunError(f"{target} could not be written: {describe(error)}") from error


def write_model_configs(folder: Path, export: Export, tokenizer: TokenizerFiles | None) -> None:
    """Write `config.json` and `generation_config.json` of a whole model."""
    write_config(folder, export.record.config, export.dtype)
    write_generation_config(folder, export.record.config, tokenizer.special_ids if tokenizer else {})


class TensorSource:
    """Tensors as they are to be written, one at a time in the same memory: what a heap makes of blocks of many sizes
    that come and go can be several times as much."""

    def __init__(self, export: Export) -> None:
        self._reader = TensorReader(export.path, export.metadata)
        self._entries = {entry.name: entry for entry in export.entries}
        stored = (
            torch.Size(entry.shape).numel() * self._reader.dtype(MODEL_PREFIX + entry.name).itemsize
            for entry in export.entries
        )
        self._stored = torch.empty(max(stored), dtype=torch.uint8)
        self._converted = torch.empty(max(entry.num_bytes for entry in export.entries), dtype=torch.uint8)

    def read(self, name: str) -> Tensor:
        """A tensor in the dtype of its entry, valid until the next call."""
        entry, dtype = self._entries[name], self._reader.dtype(MODEL_PREFIX + name)
        tensor = self._reader.read(MODEL_PREFIX + name, into=_view(self._stored, entry.shape, dtype))
        if dtype == entry.dtype:
            return tensor
        converted = _view(self._converted, entry.shape, entry.dtype).copy_(tensor)
        check_range(name, tensor, converted)
        return converted


def check_range(name: str, tensor: Tensor, converted: Tensor) -> None:
    """
    Raises:
        RunError: numbers of a tensor have become infinite in the dtype that it was converted to.
    """
    # bfloat16 has the range of float32.
    if converted.dtype == torch.float16 and bool((converted.isinf() & ~tensor.isinf()).any()):
        raise RunError(f"{name} has numbers beyond the range of float16; export in bfloat16 or float32")


def _view(memory: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor at the beginning of `memory`, which is of bytes."""
    return memory[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]
