"""One token shard as datatrove's DocumentTokenizer writes it: four files, checked and memory-mapped.

`x.ds` holds token ids (uint16 or uint32, little-endian), `x.ds.index` the cumulative ends of the documents (uint64),
`x.ds.metadata` the tokenizer's name and token width (line 1, `name|bytes`) and the token count (line 2), and
`x.ds.loss`, where present, one byte per token: 0 says that the token is no target.
"""

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.data.row import RowError

INDEX_WIDTH = 8
_BLOCK = 4096
_NEIGHBOURS = 8
"""Index entries looked at on either side of those asked for, so that a step down just outside is seen too."""

_ENDS_SEARCHED_FOR_EOS = 1024
_ENDS_SAMPLED = 4
_ENDS_SAMPLED_IN_DOUBT = 256


class ShardError(ValueError):
    """A shard is damaged or incomplete: the message starts with the file."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What is known of a shard without reading its tokens."""

    path: Path
    """The `.ds` file."""

    tokenizer_name: str
    width: int
    """Bytes per token: 2 or 4."""

    num_tokens: int
    num_documents: int
    """Entries of the index."""

    has_loss: bool
    metadata: str
    """The first two lines of the metadata."""

    @property
    def chunk_shuffled(self) -> bool:
        """Written with datatrove's `shuffle_chunk_size`: the index then holds chunk ends among the document ends."""
        return "chunk_shuffled" in self.path.name


@dataclass(frozen=True, kw_only=True)
class MappedShard:
    """The arrays of a shard, on disk."""

    tokens: np.ndarray
    """(num_tokens,) uint16 or uint32"""

    index: np.ndarray
    """(num_documents,) uint64"""

    loss: np.ndarray | None
    """(num_tokens,) uint8"""


def index_path(path: Path) -> Path:
    return path.with_name(path.name + ".index")


def metadata_path(path: Path) -> Path:
    return path.with_name(path.name + ".metadata")


def loss_path(path: Path) -> Path:
    return path.with_name(path.name + ".loss")


def open_shard(path: Path) -> Shard:
    """Read the metadata and the last index entry, and hold them against the file sizes.

    Raises:
        ShardError: the four files do not fit together.
    """
    tokenizer_name, width, num_tokens, metadata = _read_metadata(metadata_path(path))
    size = _size(path)
    if size != num_tokens * width:
        fault = "is cut short" if size < num_tokens * width else "is too long"
        raise ShardError(
            f"{path} {fault}: it has {size} bytes, but {metadata_path(path).name} says {num_tokens} tokens of "
            f"{width} bytes = {num_tokens * width}"
        )
    num_documents = _check_index(index_path(path), num_tokens)
    # A link to nowhere counts as a file that cannot be read: without it, tokens that are no targets would be.
    has_loss = loss_path(path).exists() or loss_path(path).is_symlink()
    if has_loss and _size(loss_path(path)) != num_tokens:
        raise ShardError(
            f"{loss_path(path)} has {_size(loss_path(path))} bytes for {num_tokens} tokens; it must have one per token"
        )
    return Shard(
        path=path,
        tokenizer_name=tokenizer_name,
        width=width,
        num_tokens=num_tokens,
        num_documents=num_documents,
        has_loss=has_loss,
        metadata=metadata,
    )


def _read_metadata(path: Path) -> tuple[str, int, int, str]:
    try:
        _refuse_special(path, path.stat())
        with path.open("rb") as file:
            lines = file.read(_BLOCK).decode(errors="replace").splitlines()
    except OSError as error:
        raise ShardError(
            f"{path} cannot be read ({error.strerror}); without it the width of the tokens is not known. "
            "datatrove writes it with save_final_metadata=True"
        ) from error
    name, _, width = lines[0].rpartition("|") if lines else ("", "", "")
    if width not in ("2", "4"):
        raise ShardError(f"{path} must start with '<tokenizer>|2' or '<tokenizer>|4' (bytes per token): {lines[:1]}")
    count = lines[1] if len(lines) > 1 else ""
    if not (count.isascii() and count.isdigit()):
        raise ShardError(f"{path} must hold the number of tokens in its second line, not {count!r}")
    return name, int(width), int(count), "\n".join(lines[:2])


def _size(path: Path) -> int:
    try:
        status = path.stat()
    except OSError as error:
        raise ShardError(f"{path} cannot be read ({error.strerror})") from error
    _refuse_special(path, status)
    return status.st_size


def _refuse_special(path: Path, status: os.stat_result) -> None:
    """A pipe would have its reader wait for a writer, without end."""
    if not stat.S_ISREG(status.st_mode):
        raise ShardError(f"{path} is no regular file")


def _check_index(path: Path, num_tokens: int) -> int:
    """Number of entries; the last must be the token count."""
    size = _size(path)
    if size % INDEX_WIDTH:
        raise ShardError(f"{path} is cut short: {size} bytes are not a whole number of {INDEX_WIDTH}-byte entries")
    last = 0
    if size:
        try:
            with path.open("rb") as file:
                file.seek(size - INDEX_WIDTH)
                last = int.from_bytes(file.read(INDEX_WIDTH), "little")
        except OSError as error:
            raise ShardError(f"{path} cannot be read ({error.strerror})") from error
    if last != num_tokens:
        raise ShardError(
            f"{path} does not cover its shard: the last document ends at token {last}, the shard has {num_tokens}"
        )
    return size // INDEX_WIDTH


def map_shard(shard: Shard, *, scattered: bool = False) -> MappedShard:
    """Memory-map the files.

    Args:
        scattered: a few entries here and there are wanted. The system then reads no pages around them, which for a
            thousand shards is a gigabyte.

    Raises:
        RowError: they are no longer what `open_shard` saw.
    """
    try:
        return MappedShard(
            tokens=_map(shard.path, f"<u{shard.width}", shard.num_tokens, scattered),
            index=_map(index_path(shard.path), "<u8", shard.num_documents, scattered),
            loss=_map(loss_path(shard.path), "u1", shard.num_tokens, scattered) if shard.has_loss else None,
        )
    except (OSError, ValueError) as error:
        raise RowError(f"{shard.path} changed or vanished since the start of the run ({error})") from error


def _map(path: Path, dtype: str, count: int, scattered: bool) -> np.ndarray:
    if count == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), count * np.dtype(dtype).itemsize, access=mmap.ACCESS_READ)
    if scattered:
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype, count)


def document_ends(shard: Shard, index: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Ends e of documents with start < e <= stop, in tokens of this shard.

    Args:
        index: (num_documents,) uint64 of `map_shard`, binary-searched.

    Returns:
        int64, strictly ascending (documents without tokens are passed over).

    Raises:
        RowError: the index does not ascend around here.
    """
    # As uint64: a Python integer would have numpy convert the whole index to float64.
    first, last = (int(np.searchsorted(index, np.uint64(bound), "right")) for bound in (start, stop))
    low = max(first - _NEIGHBOURS, 0)
    around = index[low : last + _NEIGHBOURS]
    ascends = bool((around[1:] >= around[:-1]).all())
    ends = around[first - low : max(last - low, 0)]
    if not ascends or last < first or (ends.size and not (start < int(ends[0]) and int(ends[-1]) <= stop)):
        raise RowError(
            f"{index_path(shard.path)} is damaged: the document ends near entry {first} (token {start}) do not ascend"
        )
    return np.unique(ends).astype(np.int64)


def check_eos(shard: Shard, eos_id: int, tokenizer_name: str) -> None:
    """Refuse a shard (with tokens) whose first document does not end with the tokenizer's EOS.

    In chunk-shuffled shards, and in those with a loss file (where datatrove cuts a final part without loss, EOS
    included), not every index end is the end of a whole document: there one of the first ends must be an EOS.

    Raises:
        ShardError: naming the shard, and the tokenizer that its metadata states.
    """
    mapped = map_shard(shard, scattered=True)
    first = int(np.searchsorted(mapped.index, np.uint64(0), "right"))  # passes over documents without tokens
    count = _ENDS_SEARCHED_FOR_EOS if shard.chunk_shuffled or shard.has_loss else 1
    ends = mapped.index[first : first + count]
    if not ends.size or int(ends.min()) == 0 or int(ends.max()) > shard.num_tokens:
        raise ShardError(f"{index_path(shard.path)} is damaged: its first document ends are not within the shard")
    last_ids = mapped.tokens[ends.astype(np.int64) - 1]
    if not (last_ids == eos_id).any():
        raise ShardError(
            f"{shard.path}: the first document ends with token {last_ids[0]}, not with the end-of-text token {eos_id} "
            f"of tokenizer {tokenizer_name}; the metadata says that tokenizer {shard.tokenizer_name!r} wrote it"
        )


def check_sampled_ends(shard: Shard, eos_id: int) -> None:
    """Refuse a shard (with tokens) whose index says other places than the tokens do: a few of its ends, evenly spread,
    must follow an EOS.

    This is what an index of another shard, or one that was written wrongly, cannot pass, while a document here and
    there that was cut without EOS is let through: only where most ends have none is the shard refused. Chunk-shuffled
    shards and those with a loss file have ends without EOS by design (see check_eos) and are not looked at.

    Raises:
        ShardError: naming the index.
    """
    if shard.chunk_shuffled or shard.has_loss:
        return
    mapped = map_shard(shard, scattered=True)
    ends = _spread_ends(shard, mapped.index, _ENDS_SAMPLED)
    if (mapped.tokens[ends - 1] == eos_id).all():
        return
    ends = _spread_ends(shard, mapped.index, _ENDS_SAMPLED_IN_DOUBT)
    without = int((mapped.tokens[ends - 1] != eos_id).sum())
    if 2 * without > ends.size:
        raise ShardError(
            f"{index_path(shard.path)} does not fit {shard.path.name}: {without} of {ends.size} document ends looked "
            f"at do not follow the end-of-text token {eos_id}; it is damaged or another shard's"
        )


def _spread_ends(shard: Shard, index: np.ndarray, count: int) -> np.ndarray:
    """int64 positive ends at up to `count` places of the index, the last one always among them."""
    places = np.linspace(0, len(index) - 1, min(count, len(index))).astype(np.int64)
    ends = index[places]
    if int(ends.max()) > shard.num_tokens or (ends[1:] < ends[:-1]).any():
        raise ShardError(f"{index_path(shard.path)} is damaged: its document ends do not ascend within the shard")
    return ends[ends > 0].astype(np.int64)


def sample(shard: Shard) -> bytes:
    """A few blocks of each file at fixed places, to recognise changed contents without reading the shard."""
    paths = [shard.path, index_path(shard.path)]
    if shard.has_loss:
        paths.append(loss_path(shard.path))
    parts = []
    for path in paths:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                for place in (0, (size - _BLOCK) // 3, (size - _BLOCK) * 2 // 3, size - _BLOCK):
                    file.seek(max(place, 0))
                    parts.append(file.read(_BLOCK))
        except OSError as error:
            raise ShardError(f"{path} cannot be read ({error.strerror})") from error
    return b"".join(parts)
