"""What a run will be, and whether it can be: everything that is known without a GPU, before anything is started.

The launcher calls `preflight`. Workers call `prepare` and `plan_run` for themselves and come to the same numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from configs.checkpoint import CheckpointConfig
from configs.checks import check_batch, check_schedule
from configs.data import TokensDataConfig
from configs.errors import ConfigError, Fault
from configs.sft import SFTConfig
from models.base import CausalLM
from models.errors import ArchError
from models.registry import build_config, build_model
from trainer.checkpoint import check_fits, find_checkpoint, read_state
from trainer.data.build import build_source
from trainer.data.loader import RowLoader
from trainer.data.row import RowSource
from trainer.errors import RunError
from trainer.model_setup import DTYPES, choose_attention
from trainer.parallel.mesh import one_rank_mesh
from trainer.state import STATE_KEYS
from trainer.tokenizer import load_tokenizer
from trainer.validation import build_validation


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a config points to, loaded and checked."""

    tokenizer: PreTrainedTokenizerBase | None
    model_config: PretrainedConfig
    source: RowSource


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
    grad_accum_steps: int
    """Micro-batches per rank and step."""

    data: str
    """One line on the data."""

    def lines(self) -> list[str]:
        """The plan for people."""
        workers = f"{self.world_size} worker{'s' * (self.world_size > 1)}"
        total = self.steps * self.tokens_per_step
        return [
            f"data: {self.data}",
            f"plan: {self.steps:,} steps of {self.rows_per_step:,} rows ({self.tokens_per_step:,} tokens), "
            f"{total:,} tokens in all, {self.epochs:.4g} epochs of {self.num_rows:,} rows",
            f"plan: {workers}, {self.grad_accum_steps} micro-batch{'es' * (self.grad_accum_steps > 1)} "
            "per worker and step",
        ]


def prepare(config: SFTConfig) -> Inputs:
    """Load the tokenizer, the architecture and the data that a config names.

    Raises:
        ConfigError: one of them is missing, damaged, or does not fit the others.
    """
    tokenizer = _tokenizer(config)
    model_config = _model_config(config, tokenizer)
    source = build_source(
        config.data,
        vocab_size=model_config.vocab_size,
        eos_token_id=tokenizer.eos_token_id if tokenizer is not None else None,  # type: ignore[arg-type]
        tokenizer_name=config.tokenizer.name,
    )
    return Inputs(tokenizer=tokenizer, model_config=model_config, source=source)


def plan_run(config: SFTConfig, source: RowSource, world_size: int) -> Plan:
    """How many steps a run has, and of what.

    The steps are `max_steps`, or else all whole steps in `data.max_epochs` passes over the data.

    Raises:
        ConfigError: the batch does not divide over the ranks, or the data and the steps do not fit.
    """
    data = config.data
    faults = check_batch(data, config.deployment.model_copy(update={"num_train_gpus": world_size}))
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
        grad_accum_steps=data.batch_size // (data.micro_batch_size * world_size),
        data=source.description,
    )


def preflight(config: SFTConfig, *, run_dir: Path, world_size: int, say: Callable[[str], None]) -> Plan:
    """Check all of a run that can be checked here.

    Args:
        run_dir: the run's directory, where [resume] without dir looks.
        world_size: workers.
        say: told what is worth knowing, such as a damaged checkpoint that is passed over.

    Raises:
        ConfigError: the run cannot go; every fault found.
    """
    inputs = prepare(config)
    faults: list[Fault] = []
    plan = model = None
    with _collecting(faults):
        plan = plan_run(config, inputs.source, world_size)
        faults += check_schedule(config.scheduler, lr=config.optim.lr, total_steps=plan.steps)
    with _collecting(faults):
        model = _build_on_meta(config, inputs.model_config)
    with _collecting(faults):
        build_validation(
            config.val,
            tokenizer=inputs.tokenizer,
            vocab_size=inputs.model_config.vocab_size,
            mesh=one_rank_mesh(torch.device("cpu")),
            pin_memory=False,
        )
    with _collecting(faults):
        if config.resume is not None:
            found = find_checkpoint(config.resume.dir or run_dir, config.resume.step, say)
            say(f"resume: from {found}")
            if plan is not None and model is not None:
                faults += _resume_faults(config, found, plan=plan, model=model, source=inputs.source)
    if faults or plan is None:
        raise ConfigError(faults)
    return plan


@contextmanager
def _collecting(faults: list[Fault]) -> Iterator[None]:
    """Go on after a ConfigError, keeping its faults: one start then shows them all."""
    try:
        yield
    except ConfigError as error:
        faults.extend(error.faults)


def _tokenizer(config: SFTConfig) -> PreTrainedTokenizerBase | None:
    if config.tokenizer.name is not None:
        return load_tokenizer(config.tokenizer.name)
    if isinstance(config.data, TokensDataConfig):
        raise ConfigError.one("tokenizer.name", "data of type tokens needs the tokenizer that wrote it")
    if config.val is not None:
        raise ConfigError.one("tokenizer.name", "[val] needs a tokenizer, to count bytes")
    return None


def _model_config(config: SFTConfig, tokenizer: PreTrainedTokenizerBase | None) -> PretrainedConfig:
    assert config.model.arch is not None, "SFTConfig.run_faults asks for it"
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    try:
        return build_config(
            config.model.arch,
            tokenizer_length=len(tokenizer) if tokenizer is not None else None,
            special_ids={name: getattr(tokenizer, name, None) for name in names},
        )
    except ArchError as error:
        raise _arch_fault(error) from error


def _build_on_meta(config: SFTConfig, model_config: PretrainedConfig) -> CausalLM:
    """The model without memory: what an architecture asks for and we lack shows here, not on every worker."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attn = choose_attention(config.model.attn, device, DTYPES[config.model.resolved_compute_dtype])
    try:
        with torch.device("meta"):
            dtype = DTYPES[config.model.optimization_dtype]
            return build_model(model_config, seq_len=config.longest_row, attn=attn, dtype=dtype)
    except ArchError as error:
        raise _arch_fault(error) from error


def _resume_faults(config: SFTConfig, path: Path, *, plan: Plan, model: CausalLM, source: RowSource) -> Iterator[Fault]:
    """Why the run cannot go on from the whole checkpoint at `path`."""
    skips = config.ckpt or CheckpointConfig()
    state = read_state(path)
    missing = [key for key in STATE_KEYS if key not in state]
    if missing:
        yield Fault(key="resume", message=f"the state.json of {path} is of another version: it lacks {missing}")
        return
    try:
        # The optimizer's moments have the shapes of these; under FSDP only the workers know which there are.
        check_fits(path, {f"model.{name}": tensor for name, tensor in model.named_parameters()}, ("optimizer.",))
    except RunError as error:
        yield Fault(key="resume", message=str(error))
    if not skips.skip_dataloader:
        data = config.data
        loader = RowLoader(
            source,
            batch_size=data.batch_size,
            micro_batch_size=data.micro_batch_size,
            dp_rank=0,
            dp_size=1,
            num_workers=0,
            pin_memory=False,
        )
        try:
            loader.load_state_dict(state["data"], state["progress"]["step"])
        except ConfigError as error:
            yield from error.faults
    step = 0 if skips.skip_progress else state["progress"]["step"]
    if step > plan.steps:
        key = "data.max_epochs" if config.max_steps is None else "max_steps"
        yield Fault(key=key, message=f"the run has {plan.steps:,} steps, fewer than the {step:,} of {path}")
    elif skips.skip_scheduler:
        yield from check_schedule(config.scheduler, lr=config.optim.lr, total_steps=plan.steps - step)


def _arch_fault(error: ArchError) -> ConfigError:
    return ConfigError.one(f"model.arch.{error.key}" if error.key else "model.arch", error.message)


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
