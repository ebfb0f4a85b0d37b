"""Which documents are held out: by a hash of the text, so that equal texts lie on the same side."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b


@dataclass(frozen=True, kw_only=True)
class HeldoutRule:
    """The same answer for the same text, in any order, file, task or process."""

    fraction: float
    seed: int

    @cached_property
    def _bound(self) -> int:
        return int(self.fraction * 2**64)

    @cached_property
    def _key(self) -> bytes:
        return self.seed.to_bytes(8, "little")

    def is_held_out(self, text: bytes) -> bool:
        """Args:
        text: UTF-8.
        """
        if not self._bound:
            return False
        digest = blake2b(text, digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little") < self._bound
