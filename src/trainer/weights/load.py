"""Reading safetensors into sharded parameters, a tensor at a time.

Each rank reads the rows that it holds and no others, straight from the mapped file into its shard, so the host needs
memory for one tensor's part at most, whatever the size of the model.
"""

import logging
import math
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.errors import ConfigError
from models.shards import local_range
from trainer.errors import RunError
from trainer.progress import ProgressBar
from trainer.weights.fit import FILE_DTYPES, check_tensors
from trainer.weights.folder import ReadRows, StoredTensor, WeightFiles, open_weights

log = logging.getLogger(__name__)

_BAR_BYTES = 1 << 30
"""Smaller models are there before anyone has seen the bar."""
_MEAN_BYTES = 1 << 24
"""Rows whose mean is taken are read in parts of this size."""


def load_weights(
    folder: Path,
    parameters: dict[str, Tensor],
    *,
    tied: dict[str, str],
    show_progress: bool,
    vocabulary: Collection[str] = (),
    open_files: Callable[[Path], WeightFiles] = open_weights,
) -> int:
    """Fill this rank's part of the parameters from the weights in a folder. Not collective.

    Args:
        folder: a Hugging Face model.
        parameters: by canonical name; plain tensors or DTensors that are replicated or sharded on dimension 0,
            unevenly too. Any float dtype, any device: values are cast from the file's.
        tied: names under which the folder may hold a parameter once more, to that parameter's name.
        show_progress: draw a bar, for a large model on a terminal.
        vocabulary: parameters with one row per token, which may have more rows than the folder's: each further one is
            the mean of those, the same bits on any number of ranks.
        open_files: reads the headers of the folder's weights: what they are stored as. May raise ConfigError.

    Returns:
        bytes that the tensors take in the files.

    Raises:
        RunError: a tensor is missing, of another shape, quantised, damaged or not finite, or a tied one differs.
    """
    try:
        files = open_files(folder)
        faults = list(check_tensors(files, _stored_shapes(files, parameters, tied, vocabulary)))
        if faults:
            raise ConfigError(faults)
    except ConfigError as error:
        raise RunError("; ".join(fault.message for fault in error.faults)) from error
    missing = [name for name in parameters if name not in files.tensors]
    if missing:
        raise RunError(f"{folder} does not hold {missing[0]}")
    # In the order of the bytes on disk; copies of tied parameters come last, when there is what to hold them against.
    order = [name for name in files.tensors if name in parameters] + [name for name in tied if name in files.tensors]
    sizes = {name: _num_bytes(files.tensors[name]) for name in order}
    show = show_progress and sum(sizes.values()) >= _BAR_BYTES
    bar = ProgressBar(description="loading weights (MB)", total=sum(sizes.values()) // 10**6) if show else None
    done = 0
    try:
        with files.open_rows() as read, torch.no_grad():
            for name in order:
                parameter, stored = parameters[tied.get(name, name)], files.tensors[name]
                _load(read, name, stored, parameter, compare=name not in parameters)
                if name in parameters and parameter.dim() and parameter.shape[0] > stored.num_rows:
                    _fill_new_rows(read, name, stored, parameter)
                done += sizes[name]
                if bar is not None:
                    bar.update(done // 10**6)
    finally:
        if bar is not None:
            bar.close()
    return done


def _stored_shapes(
    files: WeightFiles, parameters: dict[str, Tensor], tied: dict[str, str], vocabulary: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """What the files should hold: the shapes of the parameters, with fewer rows where these may have grown."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    for name in vocabulary:
        if name in files.tensors and files.tensors[name].shape:
            shapes[name] = (min(files.tensors[name].shape[0], shapes[name][0]), *shapes[name][1:])
    return shapes | {name: shapes[target] for name, target in tied.items()}


def _local_rows(name: str, parameter: Tensor) -> tuple[Tensor, int, int]:
    """This rank's part of a parameter, and its range of rows; a parameter without dimensions is one row."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    row = max(math.prod(parameter.shape[1:]), 1)
    start, stop = local_range(name, parameter)
    return local, start // row, stop // row


def _load(read: ReadRows, name: str, stored: StoredTensor, parameter: Tensor, *, compare: bool) -> None:
    local, start, stop = _local_rows(name, parameter)
    stop = min(stop, stored.num_rows)
    if local.numel() == 0 or start >= stop:
        return
    values = read(name, start, stop)
    if parameter.dim():
        local = local[: stop - start]  # without the rows that the file lacks
    if compare:
        if not torch.equal(values.to(local.device, local.dtype), local):
            raise RunError(
                f"{stored.file}: {name} differs from the embedding, and config.json says that they are one "
                "(tie_word_embeddings = true); set it to false if the head has weights of its own"
            )
        return
    # Over the bus in the file's dtype, cast where the shard is.
    local.copy_(values.to(local.device))
    low, high = torch.aminmax(local)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise RunError(f"{stored.file}: {name} holds values that are not finite in {local.dtype}")


def _fill_new_rows(read: ReadRows, name: str, stored: StoredTensor, parameter: Tensor) -> None:
    """Set the rows that the file lacks to the mean of its own. All ranks add the same numbers in the same order, so
    that nothing is sent and nothing depends on their number."""
    local, start, stop = _local_rows(name, parameter)
    count = stored.num_rows
    if stop > max(start, count) and local.numel():
        mean = _mean_row(read, name, stored)
        local[max(start, count) - start :] = torch.from_numpy(mean).to(local)
    log.info(
        "weights: rows %d to %d of %s are new, each the mean of the %d before",
        count,
        parameter.shape[0] - 1,
        name,
        count,
    )


def _mean_row(read: ReadRows, name: str, stored: StoredTensor) -> np.ndarray:
    """The mean of a stored tensor over its rows, in float64.

    numpy adds whole rows one after the other here; torch's order may depend on the number of threads.
    """
    count, row_bytes = stored.num_rows, _num_bytes(stored) // stored.num_rows
    step = max(_MEAN_BYTES // row_bytes, 1)
    total = np.zeros(stored.shape[1:])
    for start in range(0, count, step):
        total += read(name, start, min(start + step, count)).double().numpy().sum(axis=0)
    return np.asarray(total / count)


def _num_bytes(stored: StoredTensor) -> int:
    return math.prod(stored.shape) * FILE_DTYPES[stored.dtype].itemsize
