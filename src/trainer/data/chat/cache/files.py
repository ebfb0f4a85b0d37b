"""The tables of a cache of tokenised conversations, in Arrow's IPC format: written once, read by memory mapping.

`tokens.arrow` holds all samples one after the other, in record batches that none of them crosses; `samples.arrow` a
line per sample. See https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format
"""

from array import array
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa

from trainer.data.chat.cache.tokenise import Chunk

TOKENS, SAMPLES = "tokens.arrow", "samples.arrow"

_TOKENS_SCHEMA = pa.schema([("input_ids", pa.int32()), ("loss", pa.uint8())])
_SAMPLES_SCHEMA = pa.schema([("length", pa.int64()), ("loss_tokens", pa.int64()), ("row", pa.int64())])

_BATCH_TOKENS = 2**22
"""A record batch is written once it has so many: 20 MB."""


class TableWriter:
    """Writes both files. Besides one batch it takes 24 bytes of memory per sample."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] = (folder / TOKENS).open("xb")
        self._tokens = pa.ipc.new_file(self._file, _TOKENS_SCHEMA)
        self._chunks: list[Chunk] = []
        self._waiting = 0
        self._columns = {name: array("q") for name in _SAMPLES_SCHEMA.names}
        self._digests = [blake2b(digest_size=16) for _ in range(2)]

    def add(self, chunk: Chunk) -> None:
        """
        Raises:
            OSError: nothing more can be written.
        """
        for name, values in (("length", chunk.lengths), ("loss_tokens", chunk.loss_tokens), ("row", chunk.rows)):
            self._columns[name].frombytes(values.tobytes())
        for digest, values in zip(self._digests, (chunk.input_ids.astype("<i4", copy=False), chunk.loss), strict=True):
            digest.update(values.data)
        self._chunks.append(chunk)
        self._waiting += chunk.input_ids.size
        if self._waiting >= _BATCH_TOKENS:
            self._write_batch()

    def finish(self) -> str:
        """Write what is left; gives the digest of all ids and masks.

        Raises:
            OSError: nothing more can be written.
        """
        if self._waiting:
            self._write_batch()
        self._tokens.close()
        self._file.close()
        columns = [np.frombuffer(self._columns[name], np.int64) for name in _SAMPLES_SCHEMA.names]
        with (self._folder / SAMPLES).open("xb") as file, pa.ipc.new_file(file, _SAMPLES_SCHEMA) as samples:
            samples.write_batch(pa.record_batch([pa.array(column) for column in columns], _SAMPLES_SCHEMA))
        whole = blake2b(columns[0].astype("<i8", copy=False).data, digest_size=16)
        for digest in self._digests:
            whole.update(digest.digest())
        return whole.hexdigest()

    def close(self) -> None:
        """Let go of the file, however far it is."""
        self._file.close()

    def _write_batch(self) -> None:
        ids = np.concatenate([chunk.input_ids for chunk in self._chunks])
        loss = np.concatenate([chunk.loss for chunk in self._chunks]).view(np.uint8)
        self._tokens.write_batch(pa.record_batch([pa.array(ids), pa.array(loss)], _TOKENS_SCHEMA))
        self._chunks, self._waiting = [], 0


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Both files, memory-mapped: nothing is copied, and processes of a machine share them."""

    batches: list[tuple[np.ndarray, np.ndarray]]
    """(tokens,) int32 ids and bool loss of each record batch"""

    lengths: np.ndarray
    """(samples,) int64"""

    loss_tokens: np.ndarray
    """(samples,) int64"""

    rows: np.ndarray
    """(samples,) int64"""


def open_tables(folder: Path) -> Tables:
    """
    Raises:
        OSError: a file is missing.
        ValueError: a file is damaged.
    """
    tokens, samples = _open(folder / TOKENS, _TOKENS_SCHEMA), _open(folder / SAMPLES, _SAMPLES_SCHEMA)
    batches = [tokens.get_batch(number) for number in range(tokens.num_record_batches)]
    lengths, loss_tokens, rows = (_numpy(column) for column in samples.get_batch(0).columns)
    return Tables(
        batches=[(_numpy(ids), _numpy(loss).view(bool)) for ids, loss in (batch.columns for batch in batches)],
        lengths=lengths,
        loss_tokens=loss_tokens,
        rows=rows,
    )


def _open(path: Path, schema: pa.Schema) -> pa.ipc.RecordBatchFileReader:
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    if reader.schema != schema:
        raise ValueError(f"{path} has other columns")
    return reader


def _numpy(column: pa.Array) -> np.ndarray:
    return column.to_numpy(zero_copy_only=True)
