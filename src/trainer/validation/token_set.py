"""Held-out token folders: shards as in training, read document by document."""

from pathlib import Path

import numpy as np

from configs.errors import ConfigError
from models.batch import IGNORE_INDEX
from trainer.data.row import RowError
from trainer.data.shards import TokenPool
from trainer.errors import RunError
from trainer.validation.windows import KEY, Windows, cut_windows


class TokenSet:
    """A folder of token shards. See LikelihoodSet for the methods."""

    def __init__(
        self,
        name: str,
        path: Path,
        *,
        vocab_size: int,
        eos_token_id: int | None,
        tokenizer_name: str,
        prefix_id: int | None,
    ) -> None:
        """Args:
            name: name in the metrics.
            path: folder of `.ds` files.
            vocab_size: ids the model knows.
            eos_token_id: token that ends documents; None: not checked.
            tokenizer_name: for error messages.
            prefix_id: token put before every window that does not begin with it, so that all its tokens are scored;
                None: none, and the first token of a window is not.

        Raises:
            ConfigError: the shards are missing, damaged or of another tokenizer.
        """
        self.name = name
        self._pool = TokenPool([path], key=KEY)
        if eos_token_id is not None:
            self._pool.check_tokenizer(eos_token_id, tokenizer_name)
        self._vocab_size = vocab_size
        self._prefix_id = prefix_id

    @property
    def notes(self) -> list[str]:
        if self._pool.chunk_shuffled is None:
            return []
        return [f"{self._pool.chunk_shuffled} was shuffled in chunks: a document cut by a chunk counts as two"]

    @property
    def num_documents(self) -> int:
        return self._pool.num_documents

    def windows(self, seq_len: int) -> Windows:
        try:
            ends = self._pool.document_ends(0, self._pool.num_tokens)
        except RowError as error:
            raise ConfigError.one(KEY, str(error)) from error
        return cut_windows(ends, seq_len, prefix=self._prefix_id is not None)

    def read(self, start: int, num_inputs: int) -> tuple[np.ndarray, np.ndarray]:
        try:
            return self._read(start, num_inputs)
        except RowError as error:
            raise RunError(f"held-out set {self.name}: {error}") from error

    def _read(self, start: int, num_inputs: int) -> tuple[np.ndarray, np.ndarray]:
        num_labels = num_inputs
        if self._prefix_id is None:
            ids = self._read_ids(start, num_inputs + 1)
            input_ids, labels, first_label = ids[:-1], ids[1:].copy(), start + 1
        else:
            ids = self._read_ids(start, num_inputs)
            if num_inputs > 1 and ids[0] == self._prefix_id:
                # The shards have the prefix already (a tokenizer that adds BOS), and no model has seen two. The token
                # stands where the prefix would; the last position has nothing left to predict.
                num_labels -= 1
                input_ids, labels, first_label = ids, np.append(ids[1:], IGNORE_INDEX), start + 1
            else:
                input_ids, labels, first_label = np.concatenate([[self._prefix_id], ids[:-1]]), ids, start
        counted = self._pool.loss_mask(first_label, num_labels)
        if counted is not None:
            labels[:num_labels][~counted] = IGNORE_INDEX
        return input_ids, labels

    def _read_ids(self, start: int, count: int) -> np.ndarray:
        ids = self._pool.read(start, count)
        if ids.max() >= self._vocab_size:
            position = int(np.argmax(ids >= self._vocab_size))
            file, offset = self._pool.locate(start + position)
            raise RowError(
                f"{file}: token {offset} has id {ids[position]}, but the model's vocabulary has {self._vocab_size}"
            )
        return ids
