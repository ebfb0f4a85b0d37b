"""Scores held-out sets with the training weights: packed rows, sums on the device, one reduction for a whole round."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from models.base import CausalLM
from models.batch import IGNORE_INDEX, Batch
from trainer.data.collate import collate
from trainer.data.row import Rows
from trainer.errors import RunError
from trainer.parallel.mesh import Mesh
from trainer.validation.packing import PackedRows
from trainer.validation.windows import LikelihoodSet, Windows

_PADDING_ID = 0


@dataclass(frozen=True, kw_only=True)
class Task:
    """One set at one window length."""

    set: LikelihoodSet
    seq_len: int
    windows: Windows
    rows: PackedRows
    rows_per_forward: int

    def num_forwards(self, dp_size: int) -> int:
        """Forward passes of every rank: the same on each, so that the collectives inside them match."""
        return -(-self.rows.num_rows // (self.rows_per_forward * dp_size))


class RoundLeftError(Exception):
    """A round was left before all of it was scored."""


class Validation:
    """All sets at all lengths."""

    def __init__(self, *, tasks: list[Task], byte_counts: np.ndarray, mesh: Mesh, pin_memory: bool) -> None:
        """Args:
        tasks: what to score.
        byte_counts: (vocab_size,) int64, see token_bytes.
        mesh: the ranks that share the work.
        pin_memory: batches go through pinned memory.
        """
        self._tasks = tasks
        self._byte_counts = torch.from_numpy(byte_counts).to(mesh.device)
        self._mesh = mesh
        self._pin_memory = pin_memory

    @property
    def notes(self) -> list[str]:
        """What to tell the user once: the size of every task, documents that cannot be scored."""
        notes = [note for set_ in dict.fromkeys(task.set for task in self._tasks) for note in set_.notes]
        for task in self._tasks:
            windows, size = task.windows, task.num_forwards(self._mesh.dp_size)
            note = (
                f"val/{task.set.name}@{length_name(task.seq_len)}: {len(windows.starts)} windows of"
                f" {task.set.num_documents} documents in {task.rows.num_rows} rows, {size} forward passes per rank"
            )
            if windows.num_unscorable:
                note += f"; {windows.num_unscorable} documents are too short to score"
            notes.append(note)
        return notes

    def run(
        self,
        model: CausalLM,
        on_progress: Callable[[int, int], None] | None = None,
        leave: Callable[[], bool] | None = None,
    ) -> dict[str, float] | None:
        """Score everything. Collective: every rank calls it with the same weights, and gets the same numbers.

        Args:
            model: in whatever mode it is; it is left as it was.
            on_progress: called after each forward pass with the passes enqueued so far and in all.
            leave: asked before each forward pass whether to leave the round; must say the same on every rank.

        Returns:
            `val/<set>/<metric>@<length>` for loss (nats per token), perplexity and bpb (bits per byte). None if the
            round was left: numbers over a part of a set would pass for those of the whole.

        Raises:
            RunError: a set holds ids beyond the vocabulary, or no token that may be scored.
        """
        try:
            totals = self.score_own_rows(model, on_progress, leave)
        except RoundLeftError:
            return None
        if self._mesh.world_size > 1:
            dist.all_reduce(totals)
        metrics: dict[str, float] = {}
        # tolist() is the one deliberate host sync of the round.
        for task, sums in zip(self._tasks, totals.tolist(), strict=True):
            metrics |= _metrics(task, *sums)
        return metrics

    @torch.no_grad()
    def score_own_rows(
        self,
        model: CausalLM,
        on_progress: Callable[[int, int], None] | None = None,
        leave: Callable[[], bool] | None = None,
    ) -> Tensor:
        """What this rank adds to each task: (tasks, 4) float64 on the device. Nats and number of the scored tokens,
        then nats and bytes of those among them that spell text.

        Raises:
            RoundLeftError: `leave` said so.
        """
        totals = torch.zeros(len(self._tasks), 4, dtype=torch.float64, device=self._mesh.device)
        num_forwards = sum(task.num_forwards(self._mesh.dp_size) for task in self._tasks)
        done = 0
        for total, task in zip(totals, self._tasks, strict=True):
            for batch in self._batches(task):
                if leave is not None and leave():
                    raise RoundLeftError
                total += self._sums(model, batch.to(self._mesh.device))
                done += 1
                if on_progress is not None:
                    on_progress(done, num_forwards)
        return totals

    def _sums(self, model: CausalLM, batch: Batch) -> Tensor:
        """(4,) float64: see `score_own_rows`."""
        nats = model(batch).nats.double()  # (rows, seq_len)
        scored = batch.labels != IGNORE_INDEX
        num_bytes = self._byte_counts[batch.labels.clamp(min=0)] * scored
        return torch.stack([nats.sum(), scored.sum(), (nats * (num_bytes > 0)).sum(), num_bytes.sum()])

    def _batches(self, task: Task) -> Iterator[Batch]:
        """This rank's batches, all of one shape; rows past the last one are padding."""
        per_forward, dp_size = task.rows_per_forward, self._mesh.dp_size
        for forward in range(task.num_forwards(dp_size)):
            first = (forward * dp_size + self._mesh.dp_rank) * per_forward
            yield collate(fill_rows(task, first), full_rows=False, pin_memory=self._pin_memory)


def fill_rows(task: Task, first: int) -> Rows:
    """`rows_per_forward` rows from row `first` on."""
    out = Rows.empty(task.rows_per_forward, task.seq_len)
    out.input_ids.fill(_PADDING_ID)
    out.labels.fill(IGNORE_INDEX)
    for slot, row in enumerate(range(first, first + task.rows_per_forward)):
        lengths = []
        position = 0
        if row < task.rows.num_rows:
            for window in task.rows.windows_of(row):
                length = int(task.windows.num_inputs[window])
                input_ids, labels = task.set.read(int(task.windows.starts[window]), length)
                out.input_ids[slot, position : position + length] = input_ids
                out.labels[slot, position : position + length] = labels
                lengths.append(length)
                position += length
        out.num_padding[slot] = task.seq_len - position
        if position < task.seq_len:
            lengths.append(task.seq_len - position)
        out.segment_lengths[slot] = np.array(lengths, np.int64)
    return out


def length_name(seq_len: int) -> str:
    """`2k` for 2048, `1000` for 1000."""
    return f"{seq_len // 1024}k" if seq_len % 1024 == 0 else str(seq_len)


def _metrics(task: Task, nats: float, tokens: float, text_nats: float, text_bytes: float) -> dict[str, float]:
    if not tokens or not text_bytes:
        raise RunError(f"held-out set {task.set.name} has no scored token that spells text at {task.seq_len} tokens")
    loss = nats / tokens
    values = {
        "loss": loss,
        # exp overflows above 709 nats, where infinity is the honest answer
        "perplexity": math.exp(loss) if loss < 700 else loss * math.inf,
        "bpb": text_nats / (math.log(2) * text_bytes),
    }
    return {f"val/{task.set.name}/{name}@{length_name(task.seq_len)}": value for name, value in values.items()}
