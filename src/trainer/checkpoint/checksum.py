"""Checksums of files: a flipped bit in a tensor is an error, not a slightly different model."""

import hashlib
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BLOCK_BYTES = 2**24
_THREADS = min(4, os.cpu_count() or 1)


def checksum(path: Path) -> str:
    """BLAKE2b of the CRC-32s of a file's 16 MiB blocks, as 16 hex digits.

    CRC-32 reads 1.7 GB/s on one core, BLAKE2b 0.5; in blocks, several threads share the work, which hold the
    interpreter lock for moments only. It finds accidents, not forgeries.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size

        def block(offset: int) -> bytes:
            return zlib.crc32(os.pread(file.fileno(), _BLOCK_BYTES, offset)).to_bytes(4, "little")

        offsets = range(0, size, _BLOCK_BYTES)
        if len(offsets) <= 1:
            blocks = [block(offset) for offset in offsets]
        else:
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="checksum") as pool:
                blocks = list(pool.map(block, offsets))
    return hashlib.blake2b(b"".join(blocks), digest_size=8).hexdigest()
