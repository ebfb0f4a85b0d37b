"""Rows of a part to tokens, some at a time."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from configs.errors import ConfigError
from configs.renderer import RendererConfig
from trainer.data.chat.encode.encoder import Encoder
from trainer.data.chat.read.conversation import LossRules, read_conversation
from trainer.data.chat.read.parts import Part
from trainer.data.chat.render.renderer import Renderer
from trainer.data.chat.sample import Rendered, Sample, UnusableError
from trainer.data.errors import DataError, PlacedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_LOSS = "no token carries loss"

_BATCH_CHARS = 2**20
"""Text encoded at once. An encoding takes some hundred bytes per token."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be tokenised, and how: all that a worker process is told."""

    part: Part
    tokenizer: "PreTrainedTokenizerBase"
    renderer: RendererConfig
    rules: LossRules

    key: str
    """The table of the config that names the part, `data` or `val.data`."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What became of some consecutive rows."""

    num_rows: int

    rows: np.ndarray
    """(samples,) int64: the rows that gave a sample, ascending."""

    lengths: np.ndarray
    """(samples,) int64: their tokens."""

    loss_tokens: np.ndarray
    """(samples,) int64: those that carry loss; at least one each."""

    input_ids: np.ndarray
    """(tokens,) int32: all samples, one after the other."""

    loss: np.ndarray
    """(tokens,) bool"""

    dropped: list[tuple[int, str]]
    """Rows that gave no sample, ascending, and the reasons."""

    split_control_tokens: int
    """Times that message text spells a control token."""


class Tokeniser:
    """Tokenises rows of a part."""

    def __init__(self, work: Work) -> None:
        """
        Raises:
            ConfigError: tokenizer and chat template cannot be used.
        """
        self.work = work
        self.encoder = Encoder(work.tokenizer)
        self.renderer = Renderer(work.tokenizer, work.renderer, work.rules.roles)

    def tokenise(self, start: int, stop: int) -> Chunk:
        """The rows from `start` to `stop`.

        Raises:
            ConfigError: about the first row that nobody should train over.
        """
        part, growing = self.work.part, _Growing()
        waiting: list[tuple[int, Rendered]] = []
        chars = 0
        try:
            for row, raw in zip(range(start, stop), part.rows(start, stop), strict=True):
                try:
                    rendered = self.renderer.render(read_conversation(raw, self.work.rules))
                except UnusableError as error:
                    growing.dropped.append((row, str(error)))
                    continue
                except DataError as error:
                    raise self._fault(row, error) from error
                waiting.append((row, rendered))
                chars += len(rendered.text)
                if chars >= _BATCH_CHARS:
                    self._encode(waiting, growing)
                    waiting, chars = [], 0
        except (ConfigError, PlacedError) as error:
            # An earlier row comes first, whichever step it fails in.
            self._encode(waiting, growing)
            if isinstance(error, PlacedError):
                raise ConfigError.one(f"{self.work.key}.name", str(error)) from error
            raise
        self._encode(waiting, growing)
        return growing.finish(stop - start)

    def _encode(self, rendered: list[tuple[int, Rendered]], growing: "_Growing") -> None:
        try:
            samples = self.encoder.encode([one for _, one in rendered])
        except DataError:
            samples = [self._encode_one(row, one) for row, one in rendered]
        for (row, one), sample in zip(rendered, samples, strict=True):
            growing.add(row, sample, len(one.literal_spans))

    def _encode_one(self, row: int, rendered: Rendered) -> Sample:
        try:
            return self.encoder.encode([rendered])[0]
        except DataError as error:
            raise self._fault(row, error) from error

    def _fault(self, row: int, error: DataError) -> ConfigError:
        return ConfigError.one(f"{self.work.key}.name", f"{self.work.part.place(row)}: {error}")


@dataclass(kw_only=True)
class _Growing:
    """A chunk in the making."""

    rows: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    loss_tokens: list[int] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)
    split_control_tokens: int = 0

    def add(self, row: int, sample: Sample, split_control_tokens: int) -> None:
        loss_tokens = int(np.count_nonzero(sample.loss))
        if not loss_tokens:
            self.dropped.append((row, NO_LOSS))
            return
        self.rows.append(row)
        self.samples.append(sample)
        self.loss_tokens.append(loss_tokens)
        self.split_control_tokens += split_control_tokens

    def finish(self, num_rows: int) -> Chunk:
        return Chunk(
            num_rows=num_rows,
            rows=np.array(self.rows, np.int64),
            lengths=np.array([sample.input_ids.size for sample in self.samples], np.int64),
            loss_tokens=np.array(self.loss_tokens, np.int64),
            input_ids=np.concatenate([np.empty(0, np.int32), *(sample.input_ids for sample in self.samples)]),
            loss=np.concatenate([np.empty(0, bool), *(sample.loss for sample in self.samples)]),
            dropped=sorted(self.dropped),  # rows without loss are known last
            split_control_tokens=self.split_control_tokens,
        )
