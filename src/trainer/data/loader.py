"""From optimizer steps to this rank's micro-batches, by arithmetic.

All epochs of a source follow each other as one stream of rows: position p is row p mod num_rows of epoch
p // num_rows. Step k reads the rows [k * batch_size, (k + 1) * batch_size) of the stream, moved past ranges that were
skipped on purpose; a resumed run counts from the position in its checkpoint. Row i of the step goes to micro-batch m,
rank r, slot j with i = m * (dp_size * M) + r * M + j, M = micro_batch_size. Nothing else decides what is read: threads
only fill ahead what would be filled anyway.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from configs.errors import ConfigError
from models.batch import Batch
from trainer.data.collate import collate
from trainer.data.digest import Digest, add_digests, digest_rows
from trainer.data.row import Rows, RowSource
from trainer.data.stream import RowStream, differences

_STEPS_AHEAD = 2
_TOKENS_AHEAD = 1 << 23
"""Bound on what is filled ahead; a token takes 24 bytes of host memory."""


@dataclass(frozen=True, kw_only=True)
class StepBatches:
    """One rank's part of an optimizer step."""

    micro_batches: list[Batch]
    """On the host, page-locked if the loader was asked to."""

    num_loss_tokens: int
    """Of this rank."""

    digest: tuple[int, int]
    """Two uint32 lanes of this rank's rows; the step's digest is their sum over ranks modulo 2^32."""

    wait_seconds: float
    """How long the caller waited for the rows."""


@dataclass(frozen=True, kw_only=True)
class _Filled:
    batch: Batch
    digest: Digest


class RowLoader:
    """Rows of one rank, step after step; any step may be asked for, the next one is fast."""

    def __init__(
        self,
        source: RowSource,
        *,
        batch_size: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        """Args:
            batch_size: rows per optimizer step over all ranks.
            micro_batch_size: rows per rank and micro-batch.
            num_workers: threads; 0 fills in `step`.
            pin_memory: page-locked batches, for a GPU.

        Raises:
            ConfigError: batch_size is not a multiple of micro_batch_size * dp_size.
        """
        if batch_size % (micro_batch_size * dp_size):
            raise ConfigError.one(
                "data.batch_size",
                f"{batch_size} rows cannot be dealt to {dp_size} data-parallel ranks in micro-batches of "
                f"{micro_batch_size}: it must be a multiple of {micro_batch_size * dp_size}",
            )
        self._source = source
        self._stream = RowStream(num_rows=source.num_rows, batch_size=batch_size)
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._pin_memory = pin_memory
        self._micro_batches = batch_size // (micro_batch_size * dp_size)
        rows_ahead = min(_STEPS_AHEAD * self._micro_batches * micro_batch_size, _TOKENS_AHEAD // source.seq_len)
        self._max_ahead = max(1, rows_ahead // micro_batch_size)
        self._threads = ThreadPoolExecutor(num_workers, "rows") if num_workers else None
        self._ahead: deque[tuple[tuple[int, int], Future[_Filled]]] = deque()

    def step(self, step: int) -> StepBatches:
        """This rank's micro-batches of a 0-based optimizer step.

        Raises:
            RowError: a row cannot be given; and whatever else went wrong while filling it, as it was raised.
        """
        start = perf_counter()
        keys = [(step, micro_batch) for micro_batch in range(self._micro_batches)]
        filled = self._take(self._threads, keys) if self._threads else [self._fill(*key) for key in keys]
        digest: Digest = (0, 0)
        for part in filled:
            digest = add_digests(digest, part.digest)
        return StepBatches(
            micro_batches=[part.batch for part in filled],
            num_loss_tokens=sum(part.batch.num_loss_tokens for part in filled),
            digest=digest,
            wait_seconds=perf_counter() - start,
        )

    def _take(self, threads: ThreadPoolExecutor, keys: list[tuple[int, int]]) -> list[_Filled]:
        """The parts of one step, and more on their way. `_ahead` holds parts that follow each other without a gap."""
        if not self._ahead or self._ahead[0][0] != keys[0]:
            self._forget_ahead()
        following = self._following(self._ahead[-1][0] if self._ahead else None, keys[0])
        while len(self._ahead) < len(keys) + self._max_ahead:
            key = next(following)
            self._ahead.append((key, threads.submit(self._fill, *key)))
        return [self._ahead.popleft()[1].result() for _ in keys]

    def _following(self, last: tuple[int, int] | None, first: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """The parts after `last`, or from `first` on."""
        step, micro_batch = first if last is None else (last[0], last[1] + 1)
        while True:
            step, micro_batch = step + micro_batch // self._micro_batches, micro_batch % self._micro_batches
            yield step, micro_batch
            micro_batch += 1

    def _forget_ahead(self) -> None:
        while self._ahead:
            self._ahead.popleft()[1].cancel()

    def _fill(self, step: int, micro_batch: int) -> _Filled:
        size = self._micro_batch_size
        first = (micro_batch * self._dp_size + self._dp_rank) * size
        places = np.arange(first, first + size)
        epochs, indices = self._stream.rows(step, places)
        rows = Rows.empty(size, self._source.seq_len)
        for epoch in np.unique(epochs).tolist():
            here = np.flatnonzero(epochs == epoch)
            begin, end = int(here[0]), int(here[-1]) + 1  # positions rise, so an epoch's rows are together
            part = Rows(
                input_ids=rows.input_ids[begin:end],
                labels=rows.labels[begin:end],
                segment_lengths=rows.segment_lengths[begin:end],
                num_padding=rows.num_padding[begin:end],
            )
            self._source.fill(epoch, indices[begin:end], part)
            rows.segment_lengths[begin:end] = part.segment_lengths
        batch = collate(rows, full_rows=self._source.full_rows, pin_memory=self._pin_memory)
        return _Filled(batch=batch, digest=digest_rows(rows, places))

    def addresses(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(epochs, indices), each (batch_size,) int64: the rows of a step over all ranks, in the step's order."""
        batch_size = self._micro_batches * self._dp_size * self._micro_batch_size
        return self._stream.rows(step, np.arange(batch_size))

    def state_dict(self, next_step: int) -> dict[str, Any]:
        """Where the stream stands before `next_step`; JSON-able, the same on every rank."""
        return {**self._stream.state_dict(next_step), "fingerprint": self._source.fingerprint}

    def first_state(self) -> dict[str, Any]:
        """The state of a run that has read nothing yet."""
        return {"epoch": 0, "index": 0, "skips": [], "fingerprint": self._source.fingerprint}

    def load_state_dict(self, state: dict[str, Any], next_step: int) -> None:
        """Go on from a checkpoint, on any number of ranks and threads.

        Raises:
            ConfigError: key "resume": the state is incomplete, or of another source or order.
        """
        if not isinstance(state.get("fingerprint"), dict):
            raise ConfigError.one("resume", "the checkpoint holds no state of the data")
        changed = differences(state["fingerprint"], self._source.fingerprint)
        if changed:
            raise ConfigError.one(
                "resume", f"the data is not that of the checkpoint: {'; '.join(changed)}. Start a new run instead"
            )
        self._stream.load_state_dict(state, next_step)
        self._forget_ahead()

    def skip(self, first_step: int, last_step: int) -> None:
        """Pass over the rows that these steps read: `first_step` now reads those that followed `last_step`."""
        self._stream.skip(first_step, last_step)
        self._forget_ahead()

    def epochs(self, step: int) -> float:
        """Passes over the data after `step` steps; skipped rows count as passed."""
        return self._stream.position(step) / self._source.num_rows

    def close(self) -> None:
        """End the threads."""
        self._forget_ahead()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
