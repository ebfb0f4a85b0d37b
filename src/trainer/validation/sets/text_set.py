"""Held-out sets of text: texts, continuations, pairs and multiple choice."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from configs.errors import ConfigError
from trainer.data.errors import DataError
from trainer.data.row import Track
from trainer.validation.cut import cut_continuations, cut_text, read_windows, scored_bytes
from trainer.validation.metrics import (
    Options,
    choice_metrics,
    choice_records,
    continuation_metrics,
    continuation_records,
    pair_metrics,
    pair_records,
    text_metrics,
    text_records,
)
from trainer.validation.sets.cache import Work, open_or_build
from trainer.validation.sets.encode import BORDER, CHANGED
from trainer.validation.sets.kinds import Kind
from trainer.validation.sets.rows import open_rows
from trainer.validation.sets.text_encoder import TextEncoder
from trainer.validation.windows import KEY, DocumentScores, Pieces, Scores, Windows


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """What `val.context = "prefix"` puts before sequences."""

    id: int
    """BOS or EOS"""

    always: bool
    """Before each of them: the tokenizer begins texts with it. Otherwise where the first token is scored."""


class TextSet:
    """Rows of text. See LikelihoodSet for the methods."""

    def __init__(
        self,
        name: str,
        path: Path,
        *,
        encoder: TextEncoder,
        byte_counts: np.ndarray,
        prefix: Prefix | None,
        cache_dir: Path,
        track: Track,
        max_documents: int | None = None,
    ) -> None:
        """Args:
            name: name in the metrics.
            path: a file of rows, or a folder of them.
            encoder: of the run's tokenizer.
            byte_counts: (vocab_size,) int64 of `token_bytes`, for every id that the model knows.
            prefix: None: nothing is put before a sequence, and the first token of a window is not scored.
            cache_dir: folder of tokenised sets.
            track: told of the rows that are tokenised.
            max_documents: so many of the first rows are scored; None: all.

        Raises:
            ConfigError: the files are missing, damaged or not of any kind, or a row of them cannot be scored.
            RunError: the disk is full.
        """
        self.name = name
        self._byte_counts = byte_counts
        self._prefix = prefix
        self.kind: Kind
        try:
            part, self.kind = open_rows(path)
        except DataError as error:
            raise ConfigError.one(KEY, str(error)) from error
        except OSError as error:
            raise ConfigError.one(KEY, f"{path} cannot be read: {error.strerror or error}") from error
        work = Work(set_name=name, part=part, kind=self.kind, encoder=encoder, max_documents=max_documents)
        cache = open_or_build(work, cache_dir=cache_dir, track=track)
        self._record = cache.record
        self._ids, self._sequences = cache.ids, cache.sequences
        if self._record.max_id >= len(byte_counts):
            message = (
                f"{self._record.max_id_place}: its text has the token id {self._record.max_id}, but the model's "
                f"vocabulary has {len(byte_counts)}"
            )
            raise ConfigError.one(KEY, message)
        if not self.num_sequences:
            raise ConfigError.one(KEY, f"{path} has nothing to score; {'; '.join(self.notes)}")

    @property
    def num_documents(self) -> int:
        return self._record.num_rows

    @property
    def num_sequences(self) -> int:
        return self._record.num_sequences

    @property
    def notes(self) -> list[str]:
        texts = {reason: f"documents left out, because {reason}" for reason in self._record.left_out}
        texts[CHANGED] = "documents that the tokenizer changes, whose bytes are those of the changed text"
        texts[BORDER] = "documents whose context ends within a token, which counts as context as a whole"
        rows = self._record.left_out | self._record.noted
        return [f"held-out set {self.name}: {texts[what]}: {rows[what].count:,} ({rows[what].where})" for what in rows]

    @property
    def digest(self) -> str:
        record = self._record
        parts = (self.kind, record.tokens_digest, record.sequences_digest, self._prefix, len(self._byte_counts))
        return " ".join(map(str, parts))

    @property
    def wants_hits(self) -> bool:
        return self.kind == "ctxcont"

    def windows(self, seq_len: int) -> Windows:
        if self.kind == "ppl":
            return cut_text(self._sequences["end"], seq_len, prefix=self._prefix is not None)
        prefix = "never"
        if self._prefix is not None:
            prefix = "always" if self._prefix.always else "where_needed"
        return cut_continuations(
            self._starts,
            self._sequences["end"],
            self._starts + self._sequences["num_context"],
            seq_len,
            prefix=prefix,
            documents=self._sequences["document"],
        )

    def read(self, windows: Windows, numbers: np.ndarray) -> Pieces:
        prefix_id = None if self._prefix is None else self._prefix.id
        input_ids, labels = read_windows(windows, numbers, self._ids.__getitem__, prefix_id)
        num_bytes = scored_bytes(labels, windows.num_inputs[numbers], self._byte_counts)
        sequences = windows.sequences[numbers]
        first_scored = windows.first_labels[numbers] + windows.num_unscored[numbers]
        num_bytes -= self._sequences["leading_space"][sequences] * (first_scored == self._starts[sequences])
        return Pieces(input_ids=input_ids, labels=labels, num_bytes=num_bytes)

    def metrics(self, scores: Scores) -> dict[str, float]:
        match self.kind:
            case "ppl":
                return text_metrics(scores)
            case "ctxcont":
                return continuation_metrics(scores)
            case "pairs":
                return pair_metrics(scores, self._options)
            case "choices":
                return choice_metrics(scores, self._options)

    def documents(self, scores: Scores) -> DocumentScores:
        numbers = self._sequences["document"]
        match self.kind:
            case "ppl":
                return text_records(scores, numbers)
            case "ctxcont":
                return continuation_records(scores, numbers)
            case "pairs":
                return pair_records(scores, self._options, numbers[self._options.borders[:-1]])
            case "choices":
                return choice_records(scores, self._options, numbers[self._options.borders[:-1]])

    @cached_property
    def _starts(self) -> np.ndarray:
        """(sequences,) int64: first token of each."""
        ends = self._sequences["end"]
        return np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: ends.size]

    @cached_property
    def _options(self) -> Options:
        documents = self._sequences["document"]
        begins = np.flatnonzero(np.diff(documents, prepend=-1))
        borders = np.append(begins, documents.size)
        return Options(
            borders=borders,
            answers=np.flatnonzero(self._sequences["right"]) - begins,
            num_bytes=self._sequences["num_bytes"],
            firsts=np.repeat(begins, np.diff(borders)) + self._sequences["first"],
        )
