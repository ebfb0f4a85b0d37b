"""Whether a suite can be scored with the model of a run, before anything is started or claimed."""

from collections.abc import Callable

from configs.errors import ConfigError, Fault
from configs.eval_worker import EvalWorkerConfig
from configs.sft import SFTConfig
from trainer.evaluate import scoring_config
from trainer.preflight import prepare_model
from trainer.preflight.parts import check_model, check_validation, collecting, weight_faults
from trainer.preflight.plan import show_workers
from trainer.preflight.scoring import scored_lines


def scored_config(config: EvalWorkerConfig, training: SFTConfig) -> SFTConfig:
    """What workers build the model and the suite from: the run's config, with the worker's suite and ranks.

    Args:
        config: with `val`.
    """
    return scoring_config(training, config.val).model_copy(update={"log": config.log, "deployment": config.deployment})


def check_scored(config: SFTConfig, *, world_size: int, say: Callable[[str], None]) -> list[str]:
    """Check all that can be checked here, and tokenise what is in no cache yet.

    Args:
        config: from `scored_config`.
        world_size: workers.
        say: told of downloads.

    Returns:
        the plan for people.

    Raises:
        ConfigError: the suite cannot be scored; every fault found.
    """
    inputs = prepare_model(config, download=True)
    faults: list[Fault] = []
    with collecting(faults):
        check_model(config, inputs)
    with collecting(faults):
        check_validation(config, inputs)
    if not faults and config.model.lora is not None:
        faults += weight_faults(config, inputs, None, say)
    if faults:
        raise ConfigError(faults)
    assert config.val is not None, "scored_config gives it"
    return [
        f"plan: every snapshot is scored by {show_workers(world_size)} on",
        *(f"plan:   {line}" for line in scored_lines(config.val)),
    ]
