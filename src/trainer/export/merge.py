"""Adapters added to the weights of their base: a whole model, written a tensor at a time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from configs.errors import ConfigError, Fault
from models.lora import adapter_names
from trainer.checkpoint.export import DTYPES, Export, TensorSource, check_range, write_folder, write_model_configs
from trainer.errors import RunError
from trainer.weights.adapter_files import AdapterRecord
from trainer.weights.fingerprint import fingerprint
from trainer.weights.fit import is_ignored
from trainer.weights.folder import ReadRows, WeightFiles, open_weights, weight_file_names
from trainer.weights.hub import fetch_weights, find_model
from trainer.weights.tokenizer_files import TokenizerFiles
from trainer.weights.write import TensorEntry, write_safetensors


@dataclass(frozen=True, kw_only=True)
class Base:
    """The weights that adapters belong to."""

    name: str
    """As `base_model_name_or_path` has it."""

    files: WeightFiles


@dataclass(frozen=True, kw_only=True)
class Merge:
    """What is merged, and what it becomes."""

    adapters: Export
    """Read in float32."""

    record: AdapterRecord
    base: Base
    whole: Export
    """The merged model: its tensors and their dtype."""


def find_base(record: AdapterRecord, name: str | None, say: Callable[[str], None]) -> Base:
    """The base of adapters, with its weights, which are fetched where they lie on the hub.

    Args:
        name: a folder or id that holds it now; None: where it was in training.
        say: told of a download.

    Raises:
        ConfigError: it is missing, damaged, or another one.
        RunError: the adapters have none.
    """
    found = name or record.known_base
    advice = "" if name is not None else " (it is that of the run; --base says where it lies now)"
    try:
        folder = find_model(found, download=True)
        fetch_weights(found, folder, weight_file_names(folder), say)
        files = open_weights(folder)
        actual = fingerprint(files)
    except ConfigError as error:
        raise ConfigError([Fault(key="base", message=fault.message + advice) for fault in error.faults]) from error
    if actual != record.fingerprint:
        message = (
            f"the weights of {found} are not those that the adapters were trained beside ({record.base}): their "
            f"fingerprint is {actual}, not {record.fingerprint}"
        )
        raise ConfigError.one("base", message)
    return Base(name=str(folder.absolute()) if folder == Path(found) else found, files=files)


def with_base(adapters: Export, base: Base | None) -> Export:
    """The same export, its adapters naming `base` as theirs."""
    record = adapters.record.adapters
    if base is None or record is None:
        return adapters
    return replace(adapters, record=replace(adapters.record, adapters=replace(record, base=base.name)))


def plan_merge(adapters: Export, base: Base, dtype: str | None) -> Merge:
    """What the merged model holds.

    Args:
        adapters: a checkpoint's, planned in float32.
        dtype: of the merged model; None is that of the run's forward pass.
    """
    assert adapters.record.adapters is not None and adapters.dtype == "float32"
    dtype = dtype or adapters.record.export_dtype
    entries = [
        TensorEntry(name=name, shape=stored.shape, dtype=DTYPES[dtype])
        for name, stored in base.files.tensors.items()
        if not is_ignored(name)
    ]
    whole = replace(adapters, entries=entries, dtype=dtype)
    return Merge(adapters=adapters, record=adapters.record.adapters, base=base, whole=whole)


def write_merged(
    merge: Merge,
    target: Path,
    tokenizer: TokenizerFiles | None,
    *,
    max_shard_bytes: int,
    on_progress: Callable[[int], None],
) -> None:
    """Write the merged model; arguments as in `write_export`.

    Memory: the largest matrix, in float32 twice and in the dtype of the result.

    Raises:
        RunError: as `write_export`, or the base's files are damaged.
    """
    whole = merge.whole

    def fill(folder: Path) -> None:
        with merge.base.files.open_rows() as read_base:
            source = _MergedSource(merge, read_base)
            write_safetensors(
                folder, whole.entries, source.read, max_shard_bytes=max_shard_bytes, on_progress=on_progress
            )
        write_model_configs(folder, whole, tokenizer)

    write_folder(whole, target, tokenizer, fill, {"merged_with": merge.base.name})


class _MergedSource:
    """Tensors of the merged model, one at a time."""

    def __init__(self, merge: Merge, read_base: ReadRows) -> None:
        self._base, self._read_base = merge.base.files, read_base
        self._adapters = TensorSource(merge.adapters)
        self._names = {entry.name for entry in merge.adapters.entries}
        self._scale = merge.record.alpha / merge.record.rank
        self._dtype = DTYPES[merge.whole.dtype]
        known = {part for name in self._base.tensors for part in (name, *adapter_names(name))}
        missing = sorted(self._names - known)
        if missing:
            raise RunError(f"{merge.base.name} has no tensor for {missing[0]}")

    def read(self, name: str) -> Tensor:
        """A tensor in the dtype of the result."""
        if name in self._names:  # trained whole
            tensor = self._adapters.read(name)
        else:
            tensor = self._read_base(name, 0, self._base.tensors[name].num_rows)
            down_name, up_name = adapter_names(name)
            if down_name in self._names:
                down = self._adapters.read(down_name).clone()
                up = self._adapters.read(up_name)
                tensor = torch.addmm(tensor.float(), up, down, alpha=self._scale)
        converted = tensor.to(self._dtype)
        check_range(name, tensor, converted)
        return converted
