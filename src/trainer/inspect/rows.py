"""Which rows are shown, and the rows: through the loader, the source and the collation of training."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from configs.errors import ConfigError
from configs.inspect import InspectConfig
from models.batch import IGNORE_INDEX, Batch
from trainer.data.collate import collate
from trainer.data.digest import format_digest
from trainer.data.loader import RowLoader
from trainer.data.permutation import KeyedPermutation
from trainer.data.row import Rows, RowSource
from trainer.errors import RunError
from trainer.inspect.chats import Origin, origins_of


@dataclass(frozen=True, kw_only=True)
class ShownRow:
    """One row, as the model gets it. Arrays are int64 of (seq_len,), `segment_lengths` of (segments,)."""

    place: int | None
    """Where in the step it stands; None where no step was asked for."""

    epoch: int
    index: int
    """Place in the order of the epoch."""

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    segment_lengths: np.ndarray
    num_padding: int
    """Length of the last segment where that is padding, else 0."""

    origins: list[Origin] = field(default_factory=list)
    """Of the segments but padding, in order; none where the data has no conversations."""

    @property
    def num_loss_tokens(self) -> int:
        return int((self.labels != IGNORE_INDEX).sum())


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The rows asked for."""

    rows: list[ShownRow]
    step: int | None = None
    digest: str | None = None
    """Of all rows of the step: `digest/rows` in the metrics of a run that reads the same."""


def select_rows(config: InspectConfig, source: RowSource) -> Selection:
    """The rows that `rows`, `start`, `epoch`, `step` and `sample` ask for; fewer at the end of an epoch or step.

    Raises:
        ConfigError: there are no such rows, or the step is not after the checkpoint that [resume] goes on from.
        RowError: a row cannot be given.
    """
    if config.step is not None:
        return _rows_of_step(config, source, config.step)
    count = min(config.rows, source.num_rows)
    if config.sample is not None:
        indices = KeyedPermutation(source.num_rows, "inspect", config.sample)(np.arange(count))
    else:
        start = config.start or 0
        if start >= source.num_rows:
            raise ConfigError.one("start", f"{start} is past the last row: an epoch has {source.num_rows:,} rows")
        indices = np.arange(start, min(start + count, source.num_rows))
    rows = []
    for index in indices.tolist():
        buffers = Rows.empty(1, source.seq_len)
        source.fill(config.epoch, np.array([index]), buffers)
        batch = collate(buffers, full_rows=source.full_rows, pin_memory=False)
        rows.append(_shown(config, source, batch, place=None, epoch=config.epoch, index=index))
    return Selection(rows=rows)


def _rows_of_step(config: InspectConfig, source: RowSource, step: int) -> Selection:
    loader = RowLoader(
        source,
        batch_size=config.data.batch_size,
        micro_batch_size=1,  # a batch per row, in the order of the step; the rows are the same for any size
        dp_rank=0,
        dp_size=1,
        num_workers=0,
        pin_memory=False,
    )
    if config.resume is not None:
        _go_on(config, loader, step)
    epochs, indices = loader.addresses(step - 1)  # the loader counts finished steps: 0 before the first
    batches = loader.step(step - 1)
    rows = [
        _shown(config, source, batch, place=place, epoch=int(epochs[place]), index=int(indices[place]))
        for place, batch in enumerate(batches.micro_batches[: config.rows])
    ]
    return Selection(rows=rows, step=step, digest=format_digest(batches.digest))


def _go_on(config: InspectConfig, loader: RowLoader, step: int) -> None:
    """Let the loader stand where a run with this [resume] begins."""
    # The readers of checkpoints load much of torch; most inspections resume nothing.
    from trainer.checkpoint import Place, find_checkpoint, find_first, find_newest, read_state, skips_of
    from trainer.command import warn
    from trainer.run_dir import run_dir_of

    def look(place: Place) -> Path | None:
        if place.required:
            return find_checkpoint(place.run_dir, place.step, warn)
        return find_newest(place.run_dir, warn)

    assert config.resume is not None
    # A run without a name forks, and has nothing of its own.
    run_dir = config.output_dir if config.run.name is None else run_dir_of(config)
    found = find_first(config.resume, run_dir, look)
    if found is None:
        return  # resume.auto, before there is a checkpoint
    place, path = found
    state, skips = read_state(path), skips_of(config.resume, config.ckpt, is_own=place.is_own)
    try:
        first = 0 if skips.skip_progress else int(state["progress"]["step"])
        data = loader.first_state() if skips.skip_dataloader else state["data"]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"the state.json of {path} lacks the position of its run") from error
    if step <= first:
        raise ConfigError.one("step", f"{step} is not after the checkpoint that [resume] goes on from, {path}")
    loader.load_state_dict(data, first)


def _shown(
    config: InspectConfig, source: RowSource, batch: Batch, *, place: int | None, epoch: int, index: int
) -> ShownRow:
    return ShownRow(
        place=place,
        epoch=epoch,
        index=index,
        input_ids=batch.input_ids[0].numpy(),
        labels=batch.labels[0].numpy(),
        position_ids=batch.position_ids[0].numpy(),
        segment_lengths=np.diff(batch.segments.host_cu_seqlens.numpy()),
        num_padding=batch.num_padding_tokens,
        origins=origins_of(config.data, source, epoch, index),
    )
