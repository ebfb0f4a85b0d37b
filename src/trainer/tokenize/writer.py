"""Tokens of a task's documents to shards: datatrove's DocumentTokenizer with two outputs, training and held-out."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from datatrove.data import Document
from datatrove.io import DataFolder
from datatrove.pipeline.tokens.tokenizer import DocumentTokenizer, TokenizedFile, get_output_filename
from fsspec.implementations.local import LocalFileSystem
from numpy.random import default_rng

from trainer.errors import RunError
from trainer.tokenize.encoder import Encoder, configure
from trainer.tokenize.heldout import HeldoutRule

TRAIN, HELDOUT = "train", "heldout"

_BATCH_CHARS = 4 * 2**20
"""Text encoded at once. An encoding takes some hundred bytes per token, so datatrove's 10,000 documents of any length
could fill the memory."""

_BATCH_DOCUMENTS = 10_000


@dataclass(kw_only=True)
class SideCounts:
    """What went to one side."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    """Of text, UTF-8."""


@dataclass(kw_only=True)
class TaskCounts:
    """What became of the documents of a task, or of all."""

    train: SideCounts = field(default_factory=SideCounts)
    heldout: SideCounts = field(default_factory=SideCounts)
    empty: int = 0
    """Documents without text or without tokens, left out."""

    bad: int = 0
    """Rows that are no document, left out."""

    control_texts: int = 0
    """Documents whose text spells a control token; it stayed text."""

    def add(self, other: "TaskCounts") -> None:
        for mine, others in ((self.train, other.train), (self.heldout, other.heldout)):
            mine.documents += others.documents
            mine.tokens += others.tokens
            mine.bytes += others.bytes
        self.empty += other.empty
        self.bad += other.bad
        self.control_texts += other.control_texts


class ShardWriter(DocumentTokenizer):
    """Writes the files that datatrove's DocumentTokenizer writes, by its own code, for each side."""

    def __init__(
        self, encoder: Encoder, encoder_file: Path, folder: Path, *, heldout: HeldoutRule, shuffle: bool, seed: int
    ) -> None:
        """
        Args:
            encoder_file: holds `encoder.json`; datatrove loads tokenizers from files.
            folder: gets the sides' shards in folders of their names.
            seed: of the order of documents, with the task's number.
        """
        self._folders = {
            side: DataFolder(str(folder.absolute() / side), fs=LocalFileSystem()) for side in (TRAIN, HELDOUT)
        }
        super().__init__(
            self._folders[TRAIN], str(encoder_file), eos_token=encoder.eos_token, shuffle_documents=shuffle
        )
        # Loaded from the file here, with EOS as its only addition; the name given next goes into the metadata.
        configure(self.tokenizer)
        self.tokenizer_name_or_path = encoder.name
        # datatrove counts tokens, and ids may have gaps.
        self.token_size = encoder.width
        self._heldout = heldout
        self._seed = seed
        self._control = re.compile("|".join(re.escape(token) for token in encoder.control_tokens))
        self._file = folder

    def write(
        self, documents: Iterable[Document], task: int, counts: TaskCounts, on_batch: Callable[[], None]
    ) -> list[str]:
        """Tokenise the documents of a task into its shards.

        Args:
            counts: added to as documents are written.
            on_batch: called after every batch.

        Returns:
            paths of the files written, relative to the folder.

        Raises:
            RunError: a file cannot be written, for want of space for example, naming it.
        """
        self.rand = default_rng([self._seed, task])
        try:
            sides = {name: self._open(name, task) for name in (TRAIN, HELDOUT)}
            for batch in _batches(documents):
                self._write_batch(batch, sides, counts)
                on_batch()
            return [path for name, file in sides.items() for path in self._finish(name, file, task)]
        except OSError as error:
            raise RunError(f"{self._file} cannot be written: {error.strerror or error}") from error

    def _open(self, side: str, task: int) -> TokenizedFile:
        name = get_output_filename("", task, "unshuffled")
        self._file = Path(self._folders[side].path, name)
        return TokenizedFile(
            self._folders[side],
            name,
            save_index=True,
            tokenizer_name_or_path=self.tokenizer_name_or_path,
            save_final_metadata=True,
            token_size=self.token_size,
        )

    def _write_batch(self, batch: list[Document], sides: dict[str, TokenizedFile], counts: TaskCounts) -> None:
        texts = [document.text for document in batch]
        try:
            encodings = self.tokenizer.encode_batch_fast(texts)
        except Exception as error:  # tokenizers raises plain Exception, for a word without an unknown token for one
            raise RunError(f"the tokenizer {self.tokenizer_name_or_path} cannot encode a document: {error}") from error
        for text, encoding in zip(texts, encodings, strict=True):
            ids = encoding.ids
            if len(ids) < 2:  # nothing but EOS
                counts.empty += 1
                continue
            raw = text.encode()
            name = HELDOUT if self._heldout.is_held_out(raw) else TRAIN
            side = counts.heldout if name == HELDOUT else counts.train
            self._file = Path(self._folders[name].path, sides[name].filename)
            # struct.pack in there refuses an id that does not fit the width.
            sides[name].write(ids, None)
            side.documents += 1
            side.tokens += len(ids)
            side.bytes += len(raw)
            counts.control_texts += self._control.search(text) is not None

    def _finish(self, side: str, file: TokenizedFile, task: int) -> list[str]:
        self._file = Path(self._folders[side].path, file.filename)
        file.close()
        if not len(file):
            file.cleanup()
            return []
        if self.shuffle_documents:
            self._file = self._file.with_name(get_output_filename("", task, "doc_shuffled", 0))
            order = self.rand.permutation(len(file.doc_ends))
            shuffled = file.copy("", order, rank=task, sub_filename="doc_shuffled")
            file.cleanup()
            file = shuffled
        return [f"{side}/{file.filename}{suffix}" for suffix in ("", ".index", ".metadata")]


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += len(document.text)
        if chars >= _BATCH_CHARS or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
