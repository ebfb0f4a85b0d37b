"""The token pool: shards of several folders read as one long sequence of tokens, memory-mapped.

Opening costs a few small reads per shard, whatever the shards hold. Files are mapped when first read, and only the
most recently used stay mapped: each map holds a file descriptor, of which a process may have about a thousand.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from configs.errors import ConfigError, Fault
from trainer.data.row import RowError
from trainer.data.shard import (
    MappedShard,
    Shard,
    ShardError,
    check_eos,
    check_sampled_ends,
    document_ends,
    map_shard,
    open_shard,
    sample,
)

UNFINISHED = ".partial"
"""Folder in which `tokenize` makes its output before it moves it into place."""

_MAX_MAPPED = 128
_MAX_FAULTS = 10
_OPENING_THREADS = 16
"""Opening waits for the file system, on clusters a millisecond per file; ten thousand shards then take seconds."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class TokenPool:
    """A random-access sequence of tokens with the ends of its documents. Safe to read from several threads.

    Positions count tokens from the start of the first shard. Reads raise RowError when a file changed or its index is
    found damaged; everything that sizes and metadata show is a ConfigError at start.
    """

    def __init__(self, paths: list[Path], *, key: str = "data.paths") -> None:
        """Args:
            paths: folders (their `*.ds` files in sorted order) or single `.ds` files, read in this order.
            key: config key that errors carry.

        Raises:
            ConfigError: a path or file is missing, damaged or incomplete, or there is no token at all.
        """
        self._key = key
        files = [_shard_files(path, key) for path in paths]
        self._shards = _for_each(open_shard, [file for group in files for file in group], key)
        self._starts = np.cumsum([0] + [shard.num_tokens for shard in self._shards], dtype=np.int64)
        if not self.num_tokens:
            raise ConfigError.one(key, f"the shards in {', '.join(map(str, paths))} hold no token")
        group_ends = np.cumsum([len(group) for group in files])
        self._groups = [
            self._shards[end - len(group) : end] for group, end in zip(files, group_ends.tolist(), strict=True)
        ]
        self._has_loss = any(shard.has_loss for shard in self._shards)
        self._mapped: Callable[[int], MappedShard] = lru_cache(_MAX_MAPPED)(self._map)

    def _map(self, number: int) -> MappedShard:
        return map_shard(self._shards[number])

    @property
    def num_tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def num_documents(self) -> int:
        """Entries of all indices."""
        return sum(shard.num_documents for shard in self._shards)

    @property
    def shards(self) -> Sequence[Shard]:
        """All shards in the order of the pool, those without tokens too."""
        return self._shards

    @property
    def chunk_shuffled(self) -> Path | None:
        """A shard whose index ends are not all document ends (datatrove's `shuffle_chunk_size`), if there is one."""
        return next((shard.path for shard in self._shards if shard.chunk_shuffled), None)

    def read(self, start: int, count: int) -> np.ndarray:
        """(count,) int64 token ids from position `start` on; the range must lie in the pool."""
        out = np.empty(count, np.int64)
        for number, here, low, high in self._spans(start, start + count):
            out[here : here + high - low] = self._mapped(number).tokens[low:high]
        return out

    def take(self, positions: np.ndarray) -> np.ndarray:
        """(n,) int64 token ids at positions (n,) int64 in the pool, in any order."""
        out = np.empty(len(positions), np.int64)
        for number, at in self._by_shard(positions):
            out[at] = self._mapped(number).tokens[positions[at] - self._starts[number]]
        return out

    def take_loss(self, positions: np.ndarray) -> np.ndarray | None:
        """(n,) bool: `loss_mask` of the tokens at positions (n,) int64, in any order."""
        if not self._has_loss:
            return None
        out = np.ones(len(positions), np.bool_)
        for number, at in self._by_shard(positions):
            loss = self._mapped(number).loss
            if loss is not None:
                out[at] = loss[positions[at] - self._starts[number]] != 0
        return out

    def loss_mask(self, start: int, count: int) -> np.ndarray | None:
        """(count,) bool: which tokens are targets; None when no shard says. Tokens of shards that do not say are."""
        if not self._has_loss:
            return None
        out = np.ones(count, np.bool_)
        for number, here, low, high in self._spans(start, start + count):
            loss = self._mapped(number).loss
            if loss is not None:
                out[here : here + high - low] = loss[low:high] != 0
        return out

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """int64 ends e of documents with start < e <= stop, strictly ascending. The end of a shard is one."""
        ends = [
            document_ends(self._shards[number], self._mapped(number).index, low, high) + self._starts[number]
            for number, _, low, high in self._spans(start, stop)
        ]
        return np.concatenate(ends) if ends else np.empty(0, np.int64)

    def locate(self, position: int) -> tuple[Path, int]:
        """Shard of a token and its offset there, in tokens."""
        number = self._shard_of(position)
        return self._shards[number].path, position - int(self._starts[number])

    def _shard_of(self, position: int) -> int:
        if not 0 <= position < self.num_tokens:
            raise IndexError(f"token {position} of a pool of {self.num_tokens}")
        return int(np.searchsorted(self._starts, position, "right")) - 1

    def _by_shard(self, positions: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Shard number, and which of the positions lie in it."""
        numbers = np.searchsorted(self._starts, positions, "right") - 1
        order = np.argsort(numbers, kind="stable")
        found, firsts = np.unique(numbers[order], return_index=True)
        return zip(found.tolist(), np.split(order, firsts[1:]), strict=False)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(shard number, position relative to start, first and last + 1 token in the shard) of a range of tokens."""
        if start == stop:
            return
        if stop > self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of a pool of {self.num_tokens}")
        position, number = start, self._shard_of(start)
        while position < stop:
            origin, end = int(self._starts[number]), min(stop, int(self._starts[number + 1]))
            if position < end:
                yield number, position - start, position - origin, end - origin
                position = end
            number += 1

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Identity of the pool: counts, and hashes over the shards' names, metadata and sampled blocks, in order.

        Folders are not part of it: a moved pool is the same pool.
        """
        samples = _for_each(sample, self._shards, self._key)
        return {
            "shards": len(self._shards),
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "names": _hash([shard.path.name.encode() for shard in self._shards]),
            "sizes": _hash([f"{s.num_tokens} {s.num_documents} {s.has_loss}".encode() for s in self._shards]),
            "metadata": _hash([shard.metadata.encode() for shard in self._shards]),
            "contents": _hash(samples),
        }

    def check_tokenizer(self, eos_id: int, name: str) -> None:
        """Refuse shards of another tokenizer: the first document of each path must end with this one's EOS, and so must
        most of a few documents of every shard.

        Raises:
            ConfigError: naming the shard, and the tokenizer that its metadata states.
        """
        firsts = [next((shard for shard in group if shard.num_tokens), None) for group in self._groups]
        _for_each(lambda shard: check_eos(shard, eos_id, name), [shard for shard in firsts if shard], self._key)
        holding = [shard for shard in self._shards if shard.num_tokens]
        _for_each(lambda shard: check_sampled_ends(shard, eos_id), holding, self._key)


def _shard_files(path: Path, key: str) -> list[Path]:
    work = path.parent / UNFINISHED
    try:
        if UNFINISHED in path.parts or (work.is_dir() and not path.exists()):
            where = path if UNFINISHED in path.parts else work
            message = f"{where} is the unfinished work of a tokenize; run the same command again to end it"
            raise ConfigError.one(key, message)
        if path.is_file():
            if path.suffix != ".ds":
                raise ConfigError.one(key, f"{path} is neither a folder nor a .ds file")
            return [path]
        if not path.is_dir():
            raise ConfigError.one(key, f"{path} does not exist")
        names = {file.name for file in path.iterdir()}
    except OSError as error:
        raise ConfigError.one(key, f"{path} cannot be read ({error.strerror})") from error
    files = [path / name for name in sorted(names) if name.endswith(".ds")]
    for name in sorted(names):
        if name.endswith(".ds.index") and name.removesuffix(".index") not in names:
            raise ConfigError.one(key, f"{path / name} has no {name.removesuffix('.index')} beside it")
    if not files:
        raise ConfigError.one(key, f"{path} holds no .ds file")
    return files


def _for_each(work: Callable[[_Item], _Result], items: list[_Item], key: str) -> list[_Result]:
    """`work` on every item, in threads; the faults of the first few bad items become one error."""

    def attempt(item: _Item) -> _Result | ShardError | RowError:
        try:
            return work(item)
        except (ShardError, RowError) as error:
            return error

    with ThreadPoolExecutor(_OPENING_THREADS) as threads:
        outcomes = list(threads.map(attempt, items))
    faults = [
        Fault(key=key, message=str(outcome)) for outcome in outcomes if isinstance(outcome, (ShardError, RowError))
    ]
    if faults:
        raise ConfigError(faults[:_MAX_FAULTS])
    return [outcome for outcome in outcomes if not isinstance(outcome, (ShardError, RowError))]


def _hash(parts: list[bytes]) -> str:
    state = blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()
