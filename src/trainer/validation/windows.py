"""What a held-out set is to the scorer: windows of sequences, each a run of input positions with labels.

A *document* is what a user counts: a text, a question. It has one *sequence* of tokens, or one for each of its options.
A sequence is scored in one window or several.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

KEY = "val.sets"
"""Of the config, where faults of sets are reported."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """All windows of a set at one length, sequence by sequence; those of a sequence in its order."""

    sequences: np.ndarray
    """(n,) int64, ascending: which sequence of the set each is of."""

    first_labels: np.ndarray
    """(n,) int64: where the target of its first input lies in the set's stream of tokens. The inputs are the tokens
    from the one before that on."""

    num_inputs: np.ndarray
    """(n,) int32: input positions, from 1 to the window length."""

    num_unscored: np.ndarray
    """(n,) int32: so many targets at its beginning are context and are not scored here; less than num_inputs."""

    prefixed: np.ndarray
    """(n,) bool: its first input is the prefix token (BOS or EOS), in place of the token before the first target."""

    left_out: dict[str, int]
    """Documents with nothing to score at this length, or not all of what should be: how many, by reason."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Windows, read: one after the other."""

    input_ids: np.ndarray
    """(tokens,) int64: num_inputs of each"""

    labels: np.ndarray
    """(tokens,) int64; IGNORE_INDEX where a token is not scored"""

    num_bytes: np.ndarray
    """(windows,) int64: UTF-8 bytes of text that the scored tokens of each spell"""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a model made of the sequences of a set at one length, over all ranks; 0 where a sequence has no window.

    (sequences,) float64 each, the counts too.
    """

    nats: np.ndarray
    """-ln p, added up over the scored tokens"""

    text_nats: np.ndarray
    """over those that spell text: special tokens are not among them"""

    num_tokens: np.ndarray
    """scored"""

    num_bytes: np.ndarray
    """of text"""

    hits: np.ndarray
    """scored tokens that were the model's first choice"""


@dataclass(frozen=True, kw_only=True)
class DocumentScores:
    """One record for each document that was scored, for `val.save_arrays`; (n,) each."""

    documents: np.ndarray
    """int64, ascending: number of the document in the set, from 0"""

    nats: np.ndarray
    """float64; of a document with options, those of the right one"""

    num_tokens: np.ndarray
    """int64"""

    num_bytes: np.ndarray
    """int64"""

    correct: np.ndarray | None
    """bool; None for kinds that know no right and wrong"""

    option_nats: list[np.ndarray] | None = None
    """Per document: nats of each option; None for kinds without options."""


class LikelihoodSet(Protocol):
    """A held-out set whose windows can be read in any order, by any thread."""

    @property
    def name(self) -> str:
        """Name in the metrics."""
        ...

    @property
    def num_documents(self) -> int: ...

    @property
    def num_sequences(self) -> int:
        """Of all documents, whether they can be scored or not."""
        ...

    @property
    def notes(self) -> list[str]:
        """What a reader of the metrics should know, one sentence each."""
        ...

    @property
    def digest(self) -> str:
        """Of what is scored: ranks that have the same see the same set."""
        ...

    @property
    def wants_hits(self) -> bool:
        """Some metric asks for the model's first choices, which cost a pass over the logits."""
        ...

    def windows(self, seq_len: int) -> Windows:
        """The windows of at most `seq_len` inputs.

        Raises:
            ConfigError: the set cannot be read.
        """
        ...

    def read(self, windows: Windows, numbers: np.ndarray) -> Pieces:
        """Some of the windows, by their numbers (n,) int64.

        Raises:
            RunError: the file changed, or a window holds ids that the model has no embedding for.
        """
        ...

    def metrics(self, scores: Scores) -> dict[str, float]:
        """By bare names: loss, bpb, acc.

        Raises:
            RunError: nothing that may be scored was.
        """
        ...

    def documents(self, scores: Scores) -> DocumentScores:
        """The record of each document that was scored."""
        ...
