"""Whether a model can be scored, where nothing is trained (`max_steps = 0`)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from configs.errors import ConfigError, Fault
from configs.sft import SFTConfig
from configs.validation import SuiteConfig
from trainer.preflight.inputs import prepare_model
from trainer.preflight.parts import (
    check_model,
    check_validation,
    collecting,
    find_resumed,
    model_faults,
    weight_faults,
)
from trainer.preflight.plan import show_workers


@dataclass(frozen=True, kw_only=True)
class ScoringPlan:
    """What will be scored."""

    weights: str
    """Where they come from."""

    scored: list[str]
    """A line for each set, and for the conversations."""

    world_size: int

    def lines(self) -> list[str]:
        """The plan for people."""
        return [
            f"plan: no training (max_steps = 0); {self.weights}, scored by {show_workers(self.world_size)} on",
            *(f"plan:   {line}" for line in self.scored),
        ]


def preflight_scoring(config: SFTConfig, *, run_dir: Path, world_size: int, say: Callable[[str], None]) -> ScoringPlan:
    """Check all of a scoring that can be checked here. See `preflight`.

    Raises:
        ConfigError: it cannot go; every fault found.
    """
    inputs = prepare_model(config, download=True, as_stored=config.resume is None)
    faults: list[Fault] = []
    model = found = None
    with collecting(faults):
        model = check_model(config, inputs)
    with collecting(faults):
        check_validation(config, inputs)
    with collecting(faults):
        found = find_resumed(config, inputs, run_dir, say)
        if found is not None and model is not None:
            faults += model_faults(config, found, model)
    if not faults:
        faults += weight_faults(config, inputs, found, say)
    if faults:
        raise ConfigError(faults)
    assert config.val is not None, "SFTConfig.run_faults asks for it"
    return ScoringPlan(weights=_weights(config, found), scored=scored_lines(config.val), world_size=world_size)


def _weights(config: SFTConfig, found: Path | None) -> str:
    if found is not None:
        return f"the weights of {found}"
    if config.model.takes_weights_of_name:
        return f"the weights of {config.model.name}"
    return "first weights, not trained"


def scored_lines(suite: SuiteConfig) -> list[str]:
    """What is scored, for people."""
    lines = [] if suite.data is None else [f"conversations of {', '.join(part.name for part in suite.data.parts)}"]
    for entry in suite.sets:
        name = entry if isinstance(entry, str) else entry.name
        lengths = " and ".join(f"{length:,}" for length in suite.seq_lens_of(entry))
        lines.append(f"{name}, in windows of {lengths} tokens")
    return lines
