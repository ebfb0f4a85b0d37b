"""The arithmetic of a training run."""

from dataclasses import dataclass

from configs.checks import check_ranks
from configs.errors import ConfigError, Fault
from configs.sft import SFTConfig
from trainer.data.row import RowSource


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The arithmetic of a run."""

    steps: int
    """Optimizer steps of the whole run."""

    rows_per_step: int
    tokens_per_step: int
    """Padding included."""

    num_rows: int
    """Rows of an epoch."""

    epochs: float
    """Passes over the data in `steps`."""

    world_size: int
    dp_replicate: int = 1
    cp: int = 1
    grad_accum_steps: int
    """Micro-batches per rank and step."""

    data: str
    """One line on the data."""

    memory: tuple[str, ...] = ()
    """Lines on the memory of each GPU."""

    def lines(self) -> list[str]:
        """The plan for people."""
        total = self.steps * self.tokens_per_step
        workers = show_workers(self.world_size, dp_replicate=self.dp_replicate, cp=self.cp)
        return [
            f"data: {self.data}",
            f"plan: {self.steps:,} steps of {self.rows_per_step:,} rows ({self.tokens_per_step:,} tokens), "
            f"{total:,} tokens in all, {self.epochs:.4g} epochs of {self.num_rows:,} rows",
            f"plan: {workers}, {self.grad_accum_steps} "
            f"micro-batch{'es' * (self.grad_accum_steps > 1)} per worker and step",
            *self.memory,
        ]


def show_workers(world_size: int, *, dp_replicate: int = 1, cp: int = 1) -> str:
    """ "1 worker", "2 workers", "8 workers (2 replicas x 2 shards x 2 shares of a row)"."""
    workers = f"{world_size} worker{'s' * (world_size > 1)}"
    if dp_replicate == cp == 1:
        return workers
    sizes = {"replicas": dp_replicate, "shards": world_size // (dp_replicate * cp), "shares of a row": cp}
    return f"{workers} ({' x '.join(f'{size} {name}' for name, size in sizes.items() if size > 1)})"


def plan_run(config: SFTConfig, source: RowSource, world_size: int) -> Plan:
    """How many steps a run has, and of what.

    The steps are `max_steps`, or else all whole steps in `data.max_epochs` passes over the data.

    Raises:
        ConfigError: the batch does not divide over the ranks, or the data and the steps do not fit.
    """
    data = config.data
    faults = check_ranks(config.model, data, dp_replicate=config.dp_replicate, ranks=world_size)
    fitting = None if data.max_epochs is None else data.max_epochs * source.num_rows // data.batch_size
    steps = fitting if config.max_steps is None else config.max_steps
    assert steps is not None, "SFTConfig.run_faults asks for max_steps or data.max_epochs"
    if fitting is not None and (fitting < steps or (fitting == 0 and config.max_steps is None)):
        faults.append(_too_few_rows(config, source, fitting))
    if faults:
        raise ConfigError(faults)
    return Plan(
        steps=steps,
        rows_per_step=data.batch_size,
        tokens_per_step=data.batch_size * data.seq_len,
        num_rows=source.num_rows,
        epochs=steps * data.batch_size / source.num_rows,
        world_size=world_size,
        dp_replicate=config.dp_replicate,
        cp=config.model.cp,
        grad_accum_steps=data.batch_size * config.model.cp // (data.micro_batch_size * world_size),
        data=source.description,
    )


def _too_few_rows(config: SFTConfig, source: RowSource, fitting: int) -> Fault:
    data = config.data
    if config.max_steps is None:
        return Fault(
            key="data.batch_size",
            message=f"not one step: data.max_epochs = {data.max_epochs} of {source.num_rows:,} rows is less than "
            f"batch_size = {data.batch_size} ({source.description})",
        )
    needed = config.max_steps * data.batch_size / source.num_rows
    return Fault(
        key="max_steps",
        message=f"{config.max_steps:,} steps read the data {needed:.4g} times, and data.max_epochs = {data.max_epochs} "
        f"allows {fitting:,} steps ({source.num_rows:,} rows, {data.batch_size} per step)",
    )
