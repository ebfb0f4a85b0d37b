"""Held-out token folders: shards as in training, read document by document."""

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np

from configs.errors import ConfigError
from models.batch import IGNORE_INDEX
from trainer.data.row import RowError
from trainer.data.shards import TokenPool
from trainer.errors import RunError
from trainer.validation.cut import cut_text, label_positions, read_windows, scored_bytes
from trainer.validation.metrics import text_metrics, text_records
from trainer.validation.windows import KEY, DocumentScores, Pieces, Scores, Windows


class TokenFolder:
    """A folder of token shards; each document is one sequence. See LikelihoodSet for the methods."""

    wants_hits = False

    def __init__(
        self,
        name: str,
        path: Path,
        *,
        byte_counts: np.ndarray,
        eos_token_id: int | None,
        tokenizer_name: str,
        prefix_id: int | None,
        max_documents: int | None = None,
    ) -> None:
        """Args:
            name: name in the metrics.
            path: folder of `.ds` files.
            byte_counts: (vocab_size,) int64 of `token_bytes`, for every id that the model knows.
            eos_token_id: token that ends documents; None: not checked.
            tokenizer_name: for error messages.
            prefix_id: token put before every document that does not begin with it, so that all its tokens are scored;
                None: none, and the first token of a window is not.
            max_documents: so many of the first ones are scored; None: all.

        Raises:
            ConfigError: the shards are missing, damaged or of another tokenizer.
        """
        self.name = name
        self._pool = TokenPool([path], key=KEY)
        if eos_token_id is not None:
            self._pool.check_tokenizer(eos_token_id, tokenizer_name)
        self._byte_counts = byte_counts
        self._prefix_id = prefix_id
        try:
            ends = self._pool.document_ends(0, self._pool.num_tokens)
            self._ends = ends[:max_documents]
            self._begin_prefixed = self._find_prefixed()
        except RowError as error:
            raise ConfigError.one(KEY, str(error)) from error
        self._num_empty = self._pool.num_documents - len(ends)

    def _find_prefixed(self) -> np.ndarray | None:
        """(documents,) bool: those that begin with the prefix token, as a tokenizer that adds BOS has written them."""
        if self._prefix_id is None:
            return None
        return self._pool.take(np.concatenate([[0], self._ends[:-1]])) == self._prefix_id

    @property
    def num_documents(self) -> int:
        return len(self._ends)

    @property
    def num_sequences(self) -> int:
        return len(self._ends)

    @property
    def notes(self) -> list[str]:
        notes = []
        if self._pool.chunk_shuffled is not None:
            notes.append(f"{self._pool.chunk_shuffled} was shuffled in chunks: a document cut by a chunk counts as two")
        if self._num_empty:
            notes.append(f"held-out set {self.name}: documents without tokens, left out: {self._num_empty}")
        return notes

    @property
    def digest(self) -> str:
        content = [self._pool.fingerprint, self.num_documents, self._prefix_id, len(self._byte_counts)]
        state = blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16)
        state.update(self._byte_counts.tobytes())
        return state.hexdigest()

    def windows(self, seq_len: int) -> Windows:
        return cut_text(self._ends, seq_len, prefix=self._prefix_id is not None, prefixed=self._begin_prefixed)

    def read(self, windows: Windows, numbers: np.ndarray) -> Pieces:
        try:
            input_ids, labels = read_windows(windows, numbers, self._take, self._prefix_id)
            counted = self._pool.take_loss(label_positions(windows, numbers))
        except RowError as error:
            raise RunError(f"held-out set {self.name}: {error}") from error
        if counted is not None:
            labels[~counted] = IGNORE_INDEX
        num_bytes = scored_bytes(labels, windows.num_inputs[numbers], self._byte_counts)
        return Pieces(input_ids=input_ids, labels=labels, num_bytes=num_bytes)

    def _take(self, positions: np.ndarray) -> np.ndarray:
        ids = self._pool.take(positions)
        vocab_size = len(self._byte_counts)
        beyond = np.flatnonzero(ids >= vocab_size)
        if beyond.size:
            file, offset = self._pool.locate(int(positions[beyond[0]]))
            raise RowError(
                f"{file}: token {offset} has id {ids[beyond[0]]}, but the model's vocabulary has {vocab_size}"
            )
        return ids

    def metrics(self, scores: Scores) -> dict[str, float]:
        return text_metrics(scores)

    def documents(self, scores: Scores) -> DocumentScores:
        return text_records(scores, np.arange(self.num_documents))
