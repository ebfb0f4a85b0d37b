"""The root of the config: `SFTConfig`, and the checks that need more than one table."""

from pathlib import Path

from pydantic import Field, model_validator

from configs.base import BaseConfig
from configs.checkpoint import CheckpointConfig, NanGuardConfig, ResumeConfig
from configs.data import DataConfig
from configs.launch import DeploymentConfig, RunConfig
from configs.model import ModelConfig
from configs.monitor import LogConfig, MonitorsConfig
from configs.optim import AdamWConfig, ConstantSchedulerConfig, SchedulerConfig
from configs.validation import ValConfig


class TokenizerConfig(BaseConfig):
    """`[tokenizer]`"""

    name: str | None = None
    """A folder or Hugging Face id. Code in it never runs."""


class SFTConfig(BaseConfig):
    """One training run."""

    model: ModelConfig = ModelConfig()
    """Network, first weights, precision."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """Tokenizer."""

    data: DataConfig
    """Training data: a union on `type`."""

    val: ValConfig | None = None
    """Held-out validation."""

    optim: AdamWConfig = AdamWConfig()
    """Optimizer."""

    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    """Learning-rate schedule: a union on `type`."""

    ckpt: CheckpointConfig | None = None
    """Checkpoints."""

    resume: ResumeConfig | None = None
    """Go on from a checkpoint."""

    nan_guard: NanGuardConfig = NanGuardConfig()
    """Non-finite steps."""

    run: RunConfig = RunConfig()
    """Name of the run."""

    output_dir: Path = Path("outputs")
    """Folder of all runs; this one lies in output_dir / run.name."""

    clean: bool = False
    """Delete what the run directory holds and start anew."""

    max_steps: int | None = Field(None, ge=0)
    """Optimizer steps of the whole run, resumed ones included. Unset: as many as data.max_epochs allows."""

    monitors: MonitorsConfig = MonitorsConfig()
    """Where metrics go."""

    log: LogConfig = LogConfig()
    """Console and rank logs."""

    deployment: DeploymentConfig = DeploymentConfig()
    """Worker processes."""

    deterministic: bool = False
    """Bit-equal repeats on CUDA too, at some cost in speed; see docs/models.md. On CPU repeats always are."""

    dry_run: bool = False
    """Resolve, check and write the config, print what would run, start nothing."""
