"""What a run will be, and whether it can be: everything that is known without a GPU, before anything is started.

The launcher calls `preflight`. Workers call `prepare` and `plan_run` for themselves and come to the same numbers.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from configs.checkpoint import CheckpointConfig
from configs.checks import check_batch, check_schedule
from configs.errors import ConfigError, Fault
from configs.sft import SFTConfig
from models.base import CausalLM
from models.errors import ArchError
from models.hf_config import shorten
from models.registry import build_model
from trainer.adapters import adapter_record, apply_adapters, base_faults, setting_faults
from trainer.checkpoint import ModelRecord, check_fits, find_checkpoint, read_state
from trainer.checkpoint.as_model import is_checkpoint, open_model
from trainer.data.build import build_source
from trainer.data.chat.build import chat_tools
from trainer.data.loader import RowLoader
from trainer.data.row import RowSource, Track, untracked
from trainer.errors import RunError
from trainer.model_setup import DTYPES, choose_attention
from trainer.model_source import arch_fault, find_source, load_run_tokenizer, stored_config, with_room
from trainer.parallel.mesh import one_rank_mesh
from trainer.progress import ProgressBars
from trainer.state import STATE_KEYS, model_record
from trainer.validation import build_validation
from trainer.weights.fit import check_fit
from trainer.weights.folder import weight_file_names
from trainer.weights.hub import fetch_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a config points to, loaded and checked."""

    tokenizer: PreTrainedTokenizerBase | None
    model_folder: Path | None
    """Of `model.name`, a Hugging Face folder or a checkpoint; its weights need not be there."""

    whole_config: PretrainedConfig
    model_config: PretrainedConfig
    """Of the model that is trained: all of `whole_config`, or its first `model.debug.num_layers` blocks."""

    stored_vocab_size: int
    """Rows of the vocabulary in the files of `model.name`: fewer than the model's where it has grown."""

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


def prepare(config: SFTConfig, *, download: bool = False, track: Track = untracked) -> Inputs:
    """Load the tokenizer, the architecture and the data that a config names.

    Args:
        download: fetch what the model's folder on the hub has besides weights; otherwise its cache must have it.
        track: told of long work.

    Raises:
        ConfigError: one of them is missing, damaged, or does not fit the others.
    """
    model_folder = find_source(config, download=download)
    tokenizer = load_run_tokenizer(config, model_folder)
    stored = stored_config(config, model_folder, tokenizer)
    whole_config = with_room(config, stored, tokenizer)
    num_layers = config.model.debug.num_layers
    try:
        model_config = whole_config if num_layers is None else shorten(whole_config, num_layers)
    except ArchError as error:
        raise ConfigError.one("model.debug.num_layers", error.message) from error
    source = build_source(
        config.data,
        vocab_size=model_config.vocab_size,
        eos_token_id=tokenizer.eos_token_id if tokenizer is not None else None,  # type: ignore[arg-type]
        tokenizer_name=None if tokenizer is None else config.tokenizer_name,
        chats=chat_tools(config, tokenizer, track),
    )
    return Inputs(
        tokenizer=tokenizer,
        model_folder=model_folder,
        whole_config=whole_config,
        model_config=model_config,
        stored_vocab_size=stored.vocab_size,
        source=source,
    )


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
    with ProgressBars() as bars:
        inputs = prepare(config, download=True, track=bars.track)
    faults: list[Fault] = []
    plan = model = found = None
    with _collecting(faults):
        plan = plan_run(config, inputs.source, world_size)
        faults += check_schedule(config.scheduler, lr=config.optim.lr, total_steps=plan.steps)
    with _collecting(faults):
        model = _build_adapted(config, inputs)
    with _collecting(faults), ProgressBars() as bars:
        build_validation(
            config.val,
            tokenizer=inputs.tokenizer,
            vocab_size=inputs.model_config.vocab_size,
            mesh=one_rank_mesh(torch.device("cpu")),
            pin_memory=False,
            chats=chat_tools(config, inputs.tokenizer, bars.track),
        )
    with _collecting(faults):
        if config.resume is not None:
            other = config.resume.dir  # may be alive
            found = find_checkpoint(other or run_dir, config.resume.step, say, repair=other is None)
            say(f"resume: from {found}")
            for change in _model_changes(config, found, inputs):
                say(change)
            if plan is not None and model is not None:
                faults += _resume_faults(config, found, plan=plan, model=model, source=inputs.source)
    # Last, so that no gigabytes are fetched for a run that cannot be.
    needed = config.resume is None or config.model.lora is not None
    if not faults and needed and config.model.takes_weights_of_name:
        faults += _weight_faults(config, inputs, say)
        if not faults and found is not None:
            faults += base_faults(adapter_record(config.model, inputs.model_folder), read_state(found), found)
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


def _weight_faults(config: SFTConfig, inputs: Inputs, say: Callable[[str], None]) -> Iterator[Fault]:
    """Why the weights of `model.name` cannot be loaded, from the headers of its files, which are fetched for it."""
    name, folder = config.model.name, inputs.model_folder
    assert name is not None and folder is not None
    if not is_checkpoint(folder):
        fetch_weights(name, folder, weight_file_names(folder), say)
    model = _build_on_meta(config, inputs.whole_config)
    yield from check_fit(open_model(folder), model, vocab_size=inputs.stored_vocab_size)


def _build_on_meta(config: SFTConfig, model_config: PretrainedConfig) -> CausalLM:
    """The model without memory: what an architecture asks for and we lack shows here, not on every worker."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attn = choose_attention(config.model.attn, device, DTYPES[config.model.resolved_compute_dtype])
    try:
        with torch.device("meta"):
            dtype, impl = DTYPES[config.model.optimization_dtype], config.model.impl
            model = build_model(model_config, seq_len=config.longest_row, attn=attn, dtype=dtype, impl=impl)
        if config.model.init is not None:
            model.init_rules()  # a model of transformers may have none
        return model
    except ArchError as error:
        raise arch_fault(config, error) from error


def _build_adapted(config: SFTConfig, inputs: Inputs) -> CausalLM:
    """The model with its adapters, if any, without memory."""
    model, lora = _build_on_meta(config, inputs.model_config), config.model.lora
    if lora is None:
        return model
    if inputs.stored_vocab_size != inputs.model_config.vocab_size:
        message = (
            f"the tokenizer of {config.tokenizer_name} has more ids than the {inputs.stored_vocab_size} rows of "
            f"{config.model.name}, and adapters are used with the vocabulary that their base has; give the model's own "
            "tokenizer, or leave [model.lora] out"
        )
        raise ConfigError.one("tokenizer.name", message)
    apply_adapters(lora, model, compute_dtype=DTYPES[config.model.resolved_compute_dtype])
    return model


def _resume_faults(config: SFTConfig, path: Path, *, plan: Plan, model: CausalLM, source: RowSource) -> Iterator[Fault]:
    """Why the run cannot go on from the whole checkpoint at `path`."""
    skips = config.ckpt or CheckpointConfig()
    state = read_state(path)
    missing = [key for key in STATE_KEYS if key not in state]
    if missing:
        yield Fault(key="resume", message=f"the state.json of {path} is of another version: it lacks {missing}")
        return
    try:
        others = list(setting_faults(config.model, state, path))
        yield from others
        if not others:
            # The optimizer's moments have the shapes of these; under FSDP only the workers know which there are.
            trained = {name: tensor for name, tensor in model.canonical_parameters().items() if tensor.requires_grad}
            check_fits(path, {f"model.{name}": tensor for name, tensor in trained.items()}, ("optimizer.",))
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


def _model_changes(config: SFTConfig, path: Path, inputs: Inputs) -> Iterator[str]:
    """In what the run's model differs from the checkpoint's although the weights fit: a longer RoPE may be meant, a
    folder of `model.name` that changed meanwhile is not."""
    own = model_record(config, inputs.model_config, has_tokenizer=inputs.tokenizer is not None)
    try:
        saved = ModelRecord.of(read_state(path))
    except RunError as error:
        yield f"model: not compared with that of the checkpoint: {error}"
        return
    for key, (then, now) in saved.changes(own).items():
        yield f"model: {key} is {json.dumps(now)}, and {json.dumps(then)} in the checkpoint"


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
