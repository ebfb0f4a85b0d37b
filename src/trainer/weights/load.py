"""Reading safetensors into sharded parameters, a tensor at a time.

Each rank reads the rows that it holds and no others, straight from the mapped file into its shard, so the host needs
memory for one tensor's part at most, whatever the size of the model.
"""

import logging
import math
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.errors import ConfigError
from models.shards import local_range
from trainer.errors import RunError
from trainer.progress import ProgressBar
from trainer.weights.fit import FILE_DTYPES, check_tensors
from trainer.weights.folder import WeightFiles, open_weights

log = logging.getLogger(__name__)

_REMAP_BYTES = 1 << 28
"""Bytes read from a mapped file before it is mapped anew: its pages count as this process's memory until then."""
_BAR_BYTES = 1 << 30
"""Smaller models are there before anyone has seen the bar."""


def load_weights(folder: Path, parameters: dict[str, Tensor], *, tied: dict[str, str], show_progress: bool) -> int:
    """Fill this rank's part of the parameters from the safetensors of a folder. Not collective.

    Args:
        folder: a Hugging Face model.
        parameters: by canonical name; plain tensors or DTensors that are replicated or sharded on dimension 0,
            unevenly too. Any float dtype, any device: values are cast from the file's.
        tied: names under which the folder may hold a parameter once more, to that parameter's name.
        show_progress: draw a bar, for a large model on a terminal.

    Returns:
        bytes that the tensors take in the files.

    Raises:
        RunError: a tensor is missing, of another shape, quantised, damaged or not finite, or a tied one differs.
    """
    try:
        files = open_weights(folder)
        copies = {name: parameters[target] for name, target in tied.items()}
        faults = list(check_tensors(files, parameters | copies))
        if faults:
            raise ConfigError(faults)
    except ConfigError as error:
        raise RunError("; ".join(fault.message for fault in error.faults)) from error
    missing = [name for name in parameters if name not in files.tensors]
    if missing:
        raise RunError(f"{folder} does not hold {missing[0]}")
    # In the order of the bytes on disk; copies of tied parameters come last, when there is what to hold them against.
    order = [name for name in files.tensors if name in parameters] + [name for name in tied if name in files.tensors]
    sizes = {name: _num_bytes(files, name) for name in order}
    show = show_progress and sum(sizes.values()) >= _BAR_BYTES
    bar = ProgressBar(description="loading weights (MB)", total=sum(sizes.values()) // 10**6) if show else None
    done = 0
    try:
        with _Rows(files) as rows, torch.no_grad():
            for name in order:
                _load(rows, name, parameters[tied.get(name, name)], compare=name not in parameters)
                done += sizes[name]
                if bar is not None:
                    bar.update(done // 10**6)
    finally:
        if bar is not None:
            bar.close()
    return done


def _load(rows: "_Rows", name: str, parameter: Tensor, *, compare: bool) -> None:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.numel() == 0:
        return
    row = math.prod(parameter.shape[1:])
    start, stop = local_range(name, parameter)
    stored = rows.read(name, start // row, stop // row)
    if compare:
        if not torch.equal(stored.to(local.device, local.dtype), local):
            raise RunError(
                f"{rows.file_of(name)}: {name} differs from the embedding, and config.json says that they are one "
                "(tie_word_embeddings = true); set it to false if the head has weights of its own"
            )
        return
    # Over the bus in the file's dtype, cast where the shard is.
    local.copy_(stored.to(local.device))
    low, high = torch.aminmax(local)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise RunError(f"{rows.file_of(name)}: {name} holds values that are not finite in {local.dtype}")


def _num_bytes(files: WeightFiles, name: str) -> int:
    stored = files.tensors[name]
    return math.prod(stored.shape) * FILE_DTYPES[stored.dtype].itemsize


class _Rows:
    """Rows of stored tensors; one file is open at a time."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        self._path: Path | None = None
        self._reader: Any = None
        self._bytes = 0

    def __enter__(self) -> "_Rows":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()
        if isinstance(error, SafetensorError):
            raise RunError(f"{self._path} is damaged or cut short ({error})") from error

    def file_of(self, name: str) -> Path:
        return self._files.tensors[name].file

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """(stop - start, ...) rows in the file's dtype, on the CPU: a view of the mapped file."""
        path = self.file_of(name)
        if path != self._path or self._bytes >= _REMAP_BYTES:
            self._close()
            self._path, self._bytes = path, 0
            self._reader = safe_open(path, framework="pt").__enter__()
        rows = self._reader.get_slice(name)[start:stop]
        self._bytes += rows.nbytes
        return rows

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.__exit__(None, None, None)
            self._reader = None
