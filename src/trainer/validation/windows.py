"""What a held-out set is to the scorer: windows, each a run of input positions with labels.

A kind of set (a file of this folder) says where its windows lie and reads them; packing, scoring and the sums over
ranks are the same for all kinds.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

KEY = "val.sets"
"""Of the config, where faults of sets are reported."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """All windows of a set at one length, 12 bytes each."""

    starts: np.ndarray
    """(n,) int64: where each begins, in positions that mean something to the set alone."""

    num_inputs: np.ndarray
    """(n,) int32: input positions of each, from 1 to the window length."""

    num_unscorable: int
    """Documents too short to have a scored token."""


class LikelihoodSet(Protocol):
    """A held-out set whose windows can be read in any order."""

    @property
    def name(self) -> str:
        """Name in the metrics."""
        ...

    @property
    def num_documents(self) -> int: ...

    @property
    def notes(self) -> list[str]:
        """What a reader of the metrics should know, one sentence each."""
        ...

    def windows(self, seq_len: int) -> Windows:
        """The windows of `seq_len` tokens, and the shorter last ones of the documents."""
        ...

    def read(self, start: int, num_inputs: int) -> tuple[np.ndarray, np.ndarray]:
        """Input ids and labels of a window, (num_inputs,) int64 each; IGNORE_INDEX where a token is not scored.

        Raises:
            RunError: the file changed, or the window holds ids that the model has no embedding for.
        """
        ...


def cut_windows(document_ends: np.ndarray, seq_len: int, *, prefix: bool) -> Windows:
    """Disjoint windows of `seq_len` tokens of every document, the last one of a document shorter.

    A window of n tokens takes n - 1 input positions, and its first token is not scored; with `prefix` it takes n and
    all its tokens are scored, the first one after a prefix token.

    Args:
        document_ends: (documents,) int64, ascending; each document starts where the one before it ends.
        seq_len: tokens per window.
    """
    document_starts = np.concatenate([np.zeros(1, np.int64), document_ends[:-1]])
    lengths = document_ends - document_starts
    counts = -(-lengths // seq_len)
    first_window = np.cumsum(counts) - counts
    number_in_document = np.arange(counts.sum()) - np.repeat(first_window, counts)
    starts = np.repeat(document_starts, counts) + number_in_document * seq_len
    num_tokens = np.minimum(np.repeat(document_ends, counts) - starts, seq_len)
    unscored = 0 if prefix else 1
    scorable = num_tokens > unscored
    return Windows(
        starts=starts[scorable],
        num_inputs=(num_tokens[scorable] - unscored).astype(np.int32),
        num_unscorable=int((lengths <= unscored).sum()),
    )
