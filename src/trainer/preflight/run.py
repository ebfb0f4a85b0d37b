"""Whether a run can be: a training, or a scoring where nothing is trained (`max_steps = 0`)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from configs.checkpoint import CheckpointConfig
from configs.checks import check_layout, check_schedule
from configs.errors import ConfigError, Fault, collecting
from configs.sft import SFTConfig
from configs.validation import SuiteConfig
from models.base import CausalLM
from trainer.checkpoint import read_state, skips_of
from trainer.data.loader import RowLoader
from trainer.data.row import RowSource
from trainer.preflight.checks import (
    check_model,
    check_validation,
    find_resumed,
    model_faults,
    share_faults,
    weight_faults,
)
from trainer.preflight.inputs import prepare, prepare_model
from trainer.preflight.memory import lever_faults, memory_lines
from trainer.preflight.plan import Plan, plan_run, show_workers
from trainer.progress import ProgressBars
from trainer.state import STATE_KEYS


def preflight(config: SFTConfig, *, run_dir: Path, world_size: int, say: Callable[[str], None]) -> Plan:
    """Check all of a training that can be checked here.

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
    with collecting(faults):
        plan = plan_run(config, inputs.source, world_size)
        faults += check_schedule(config.scheduler, lr=config.optim.lr, total_steps=plan.steps)
    with collecting(faults):
        model = check_model(config, inputs)
        faults += share_faults(config, model)
        faults += lever_faults(config)
    with collecting(faults):
        check_validation(config, inputs)
    with collecting(faults):
        found = find_resumed(config, inputs, run_dir, say)
        if found is not None and plan is not None and model is not None:
            place, path = found
            skips = skips_of(config.resume, config.ckpt, is_own=place.is_own)
            faults += _resume_faults(config, path, skips, plan=plan, model=model, source=inputs.source)
    if not faults:
        faults += weight_faults(config, inputs, None if found is None else found[1], say)
    if faults or plan is None:
        raise ConfigError(faults)
    if config.dry_run or config.slurm is not None:  # else the first worker says it, beside what its GPU has
        plan = replace(plan, memory=tuple(memory_lines(config, inputs, plan)))
    return plan


def preflight_scoring(
    config: SFTConfig, *, run_dir: Path, world_size: int, say: Callable[[str], None], has_checkpoint: bool = True
) -> list[str]:
    """Check all of a scoring that can be checked here. Arguments as in `preflight`.

    Args:
        has_checkpoint: that of [resume] is there; not yet where snapshots of a training will be scored.

    Returns:
        the plan for people.

    Raises:
        ConfigError: it cannot go; every fault found.
    """
    inputs = prepare_model(config, download=True)
    faults: list[Fault] = check_layout(config.model, dp_replicate=config.dp_replicate, ranks=world_size)
    model = found = None
    with collecting(faults):
        model = check_model(config, inputs)
        faults += share_faults(config, model)
        faults += lever_faults(config)
    with collecting(faults):
        check_validation(config, inputs)
    with collecting(faults):
        if has_checkpoint:
            resumed = find_resumed(config, inputs, run_dir, say)
            found = None if resumed is None else resumed[1]
        if found is not None and model is not None:
            faults += model_faults(config, found, model)
    if not faults:
        faults += weight_faults(config, inputs, found, say)
    if faults:
        raise ConfigError(faults)
    assert config.val is not None, "SFTConfig.run_faults asks for it"
    what = f"no training (max_steps = 0); {_weights(config, found)}" if has_checkpoint else "every snapshot"
    workers = show_workers(world_size, dp_replicate=config.dp_replicate, cp=config.model.cp)
    return [f"plan: {what}, scored by {workers} on", *_scored_lines(config.val)]


def _weights(config: SFTConfig, found: Path | None) -> str:
    if found is not None:
        return f"the weights of {found}"
    if config.model.takes_weights_of_name:
        return f"the weights of {config.model.name}"
    return "first weights, not trained"


def _scored_lines(suite: SuiteConfig) -> Iterator[str]:
    if suite.data is not None:
        yield f"plan:   conversations of {', '.join(part.name for part in suite.data.parts)}"
    for entry in suite.sets:
        name = entry if isinstance(entry, str) else entry.name
        lengths = " and ".join(f"{length:,}" for length in suite.seq_lens_of(entry))
        yield f"plan:   {name}, in windows of {lengths} tokens"


def _resume_faults(
    config: SFTConfig, path: Path, skips: CheckpointConfig, *, plan: Plan, model: CausalLM, source: RowSource
) -> Iterator[Fault]:
    """Why the run cannot go on from the whole checkpoint at `path`, with these `skip_*`."""
    state = read_state(path)
    missing = [key for key in STATE_KEYS if key not in state]
    if missing:
        yield Fault(key="resume", message=f"the state.json of {path} is of another version: it lacks {missing}")
        return
    yield from model_faults(config, path, model)
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
