"""Whether a training run can be."""

from collections.abc import Callable, Iterator
from pathlib import Path

from configs.checkpoint import CheckpointConfig
from configs.checks import check_schedule
from configs.errors import ConfigError, Fault
from configs.sft import SFTConfig
from models.base import CausalLM
from trainer.checkpoint import read_state
from trainer.data.loader import RowLoader
from trainer.data.row import RowSource
from trainer.preflight.inputs import prepare
from trainer.preflight.parts import (
    check_model,
    check_validation,
    collecting,
    find_resumed,
    model_faults,
    weight_faults,
)
from trainer.preflight.plan import Plan, plan_run
from trainer.progress import ProgressBars
from trainer.state import STATE_KEYS


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
    with collecting(faults):
        plan = plan_run(config, inputs.source, world_size)
        faults += check_schedule(config.scheduler, lr=config.optim.lr, total_steps=plan.steps)
    with collecting(faults):
        model = check_model(config, inputs)
    with collecting(faults):
        check_validation(config, inputs)
    with collecting(faults):
        found = find_resumed(config, inputs, run_dir, say)
        if found is not None and plan is not None and model is not None:
            faults += _resume_faults(config, found, plan=plan, model=model, source=inputs.source)
    if not faults:
        faults += weight_faults(config, inputs, found, say)
    if faults or plan is None:
        raise ConfigError(faults)
    return plan


def _resume_faults(config: SFTConfig, path: Path, *, plan: Plan, model: CausalLM, source: RowSource) -> Iterator[Fault]:
    """Why the run cannot go on from the whole checkpoint at `path`."""
    skips = config.ckpt or CheckpointConfig()
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
