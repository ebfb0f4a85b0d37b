"""The safetensors of a Hugging Face folder, known from their headers alone: which tensors there are, and where.

Nothing in the folder is trusted: no pickle is read, no code runs, and no file outside of it is opened.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.errors import ConfigError
from trainer.errors import RunError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

ReadRows = Callable[[str, int, int], Tensor]
"""read(name, start, stop): (stop - start, ...) rows in the stored dtype, on the CPU. A tensor without dimensions is one
row, and comes whole. Raises RunError where the file is damaged; so may the end of the context that gave the function.
"""

_REMAP_BYTES = 1 << 28
"""Bytes read from a mapped file before it is mapped anew: its pages count as this process's memory until then."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a file."""

    file: Path
    dtype: str
    """In safetensors' names: F32, BF16, ..."""

    shape: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Along the first dimension; a tensor without dimensions is one row."""
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """All tensors of a folder."""

    folder: Path
    tensors: dict[str, StoredTensor]
    """By name; file after file, in the order of the bytes."""

    open_rows: Callable[[], AbstractContextManager[ReadRows]]
    """For reading, as long as the context lasts."""


class _MappedFiles:
    """Views of mapped files, of which one is open at a time."""

    def __init__(self, tensors: dict[str, StoredTensor]) -> None:
        self._tensors = tensors
        self.path: Path | None = None
        self._reader: Any = None
        self._bytes = 0

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """As ReadRows."""
        stored = self._tensors[name]
        if stored.file != self.path or self._bytes >= _REMAP_BYTES:
            self.close()
            self.path, self._bytes = stored.file, 0
            self._reader = safe_open(stored.file, framework="pt").__enter__()
        rows = self._reader.get_slice(name)[start:stop] if stored.shape else self._reader.get_tensor(name)
        self._bytes += rows.nbytes
        return rows

    def close(self) -> None:
        if self._reader is not None:
            self._reader.__exit__(None, None, None)
            self._reader = None


@contextmanager
def _open_mapped(tensors: dict[str, StoredTensor]) -> Iterator[ReadRows]:
    files = _MappedFiles(tensors)
    try:
        yield files.read
    except SafetensorError as error:
        raise RunError(f"{files.path} is damaged or cut short ({error})") from error
    finally:
        files.close()


def weight_file_names(folder: Path) -> list[str]:
    """Names of the files that hold the folder's weights, from the index if there is one; they need not be there.

    Raises:
        ConfigError: the index is damaged or points out of the folder, or an index and a single file contradict each
            other.
    """
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        return [SINGLE_FILE]
    files = sorted(set(_read_index(index_path).values()))
    if SINGLE_FILE not in files and (folder / SINGLE_FILE).exists():
        raise _fault(f"{folder} holds both {SINGLE_FILE} and {INDEX_FILE} with other files: delete one of them")
    return files


def open_weights(folder: Path) -> WeightFiles:
    """Read the headers of all weight files; no tensor is read.

    Raises:
        ConfigError: a file is missing, cut short or damaged, a tensor is there twice, or index and files differ.
    """
    names = weight_file_names(folder)
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        path = _inside(folder, name)
        if not path.is_file():
            raise _missing(folder, name)
        for tensor, stored in _read_header(path).items():
            if tensor in tensors:
                raise _fault(f"{tensor} is in {tensors[tensor].file} and in {path}: only one of them can count")
            tensors[tensor] = stored
    index_path = folder / INDEX_FILE
    if index_path.exists():
        for tensor, name in _read_index(index_path).items():
            if tensor not in tensors or tensors[tensor].file.name != name:
                raise _fault(f"{index_path} says that {tensor} is in {name}, which does not hold it")
    return WeightFiles(folder=folder, tensors=tensors, open_rows=partial(_open_mapped, tensors))


def _read_header(path: Path) -> dict[str, StoredTensor]:
    tensors = {}
    try:
        with safe_open(path, framework="pt") as reader:
            for name in reader.offset_keys():
                part = reader.get_slice(name)
                tensors[name] = StoredTensor(file=path, dtype=part.get_dtype(), shape=tuple(part.get_shape()))
    except SafetensorError as error:
        raise _fault(f"{path} is damaged or cut short ({error}); fetch it anew") from error
    except OSError as error:
        raise _fault(f"{path} cannot be read: {error}") from error
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    _inside(path.parent, path.name)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _fault(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _fault(f"{path} is not valid JSON: {error}") from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise _fault(f"{path} has no weight_map from tensor names to file names")
    for name in files.values():
        if Path(name).name != name or not name.endswith(".safetensors") or not name.isprintable():
            raise _fault(f"{path} points at {name!r}: only .safetensors files beside it are read")
    return files


def _inside(folder: Path, name: str) -> Path:
    """`folder / name`, unless it is a link that leads out: the hub's cache, whose snapshots are links, may do that."""
    path = folder / name
    try:
        home, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise _fault(f"{path} cannot be read: {error}") from error
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(target.is_relative_to(home) for home in homes):
        raise _fault(f"{path} is a link to {target}, outside of the folder: not followed")
    return path


def _missing(folder: Path, name: str) -> ConfigError:
    if name != SINGLE_FILE or (folder / INDEX_FILE).exists():
        return _fault(f"{folder / name} is missing, and {INDEX_FILE} names it; fetch the model anew")
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        return _fault(
            f"{folder} holds its weights as {pickles[0]} only, a pickle, which can run code when it is read; only "
            "safetensors are loaded. Convert it where you trust it: "
            "transformers.AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )
    return _fault(
        f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}, and weights in other formats are not read; with "
        "[model.init] only its config.json is needed"
    )


def _fault(message: str) -> ConfigError:
    return ConfigError.one("model.name", message)
