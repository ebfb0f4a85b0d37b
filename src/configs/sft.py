"""The root of the config: `SFTConfig`, and the checks that need more than one table."""

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from configs.base import BaseConfig
from configs.checkpoint import CheckpointConfig, EvalSnapshotsConfig, NanGuardConfig, ResumeConfig
from configs.checks import (
    check_data,
    check_deployment,
    check_end,
    check_layout,
    check_moments,
    check_ranks,
    check_requeue,
    check_resume,
    check_rounds,
    check_schedule,
    check_scoring,
    check_shares,
    check_skips,
    check_suite,
    check_weights,
    may_start_anew,
)
from configs.data import DataConfig
from configs.errors import Fault
from configs.launch import DeploymentConfig, MultiNodeConfig, RunConfig, SingleNodeConfig, SlurmConfig
from configs.model import ModelConfig
from configs.monitor import LogConfig, MonitorsConfig
from configs.optim import AdamWConfig, ConstantSchedulerConfig, SchedulerConfig
from configs.renderer import RendererConfig
from configs.validation import ValConfig


class TokenizerConfig(BaseConfig):
    """`[tokenizer]`"""

    name: str | None = None
    """A folder or Hugging Face id. Unset: `model.name`, where a tokenizer is needed. Code in it never runs."""


class SFTConfig(BaseConfig):
    """One training run."""

    model: ModelConfig = ModelConfig()
    """Network, first weights, precision."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """Tokenizer."""

    data: DataConfig
    """Training data: a union on `type`. With max_steps = 0 it is not read, and may be left out."""

    renderer: RendererConfig = RendererConfig()
    """Chat template and its options."""

    val: ValConfig | None = None
    """Held-out validation."""

    optim: AdamWConfig = AdamWConfig()
    """Optimizer."""

    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    """Learning-rate schedule: a union on `type`."""

    ckpt: CheckpointConfig | None = None
    """Checkpoints."""

    eval_snapshots: EvalSnapshotsConfig | None = None
    """Weights for `eval-worker` to score beside the training."""

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

    max_steps: int | None = Field(default=None, ge=0)
    """Optimizer steps of the whole run, resumed ones included. Unset: as many as data.max_epochs allows. 0: no
    training; the model, or the checkpoint that [resume] names, is scored on [val]."""

    monitors: MonitorsConfig = MonitorsConfig()
    """Where metrics go."""

    log: LogConfig = LogConfig()
    """Console and rank logs."""

    deployment: DeploymentConfig = SingleNodeConfig()
    """Worker processes: a union on `type`."""

    slurm: SlurmConfig | None = None
    """Submit the run as a SLURM job."""

    gc_interval: int | None = Field(default=50, ge=1)
    """Python's garbage is collected every gc_interval-th step, on all ranks at once. None: whenever Python likes."""

    deterministic: bool = False
    """Bit-equal repeats on CUDA too, at some cost in speed; see docs/models.md. On CPU repeats always are."""

    dry_run: bool = False
    """Resolve, check and write the config, print what would run, start nothing."""

    @model_validator(mode="before")
    @classmethod
    def _no_data_to_score(cls, values: Any) -> Any:
        if isinstance(values, dict) and "data" not in values and values.get("max_steps") == 0:
            return {**values, "data": {"type": "none"}}
        return values

    @property
    def only_scores(self) -> bool:
        """Nothing is trained: the model is scored on `[val]`, and that is all."""
        return self.max_steps == 0

    @property
    def tokenizer_name(self) -> str | None:
        """Where the tokenizer is: `tokenizer.name`, or else the model's folder or id."""
        return self.tokenizer.name or self.model.name

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row that the model will see, in training or validation."""
        validated = 0 if self.val is None else self.val.longest_row
        return validated if self.only_scores and validated else max(self.data.seq_len, validated)

    @property
    def ranks(self) -> int | None:
        """Worker processes; None where the machine's GPUs decide."""
        match self.deployment:
            case SingleNodeConfig(num_train_gpus=asked, gpus_per_node=there):
                return asked or (there if self.slurm is not None else None)
            case MultiNodeConfig(num_nodes=nodes, gpus_per_node=there):
                return nodes * there

    @property
    def dp_replicate(self) -> int:
        """Replicas of the weights."""
        match self.deployment:
            case MultiNodeConfig(num_nodes=nodes, nodes_per_fsdp_group=group) if group is not None:
                return nodes // group
            case _:
                return self.model.dp_replicate

    @property
    def _row_lengths(self) -> dict[str, list[int]]:
        trained = {} if self.only_scores else {"data.seq_len": [self.data.seq_len]}
        return trained if self.val is None else trained | self.val.row_lengths

    @property
    def chat_cache(self) -> Path:
        """Folder of tokenised conversations where a table of chats names none."""
        return self.output_dir / ".cache" / "chats"

    @property
    def val_cache(self) -> Path:
        """Folder of tokenised held-out sets where the table of them names none."""
        return self.output_dir / ".cache" / "val"

    def run_faults(self) -> list[Fault]:
        if self.only_scores:
            # Whatever is wrong about the training data, the batch or the schedule: nothing of it is used.
            return [
                *check_deployment(self.deployment, self.model, has_slurm=self.slurm is not None),
                *check_requeue(self.slurm, self.ckpt, only_scores=True),
                *check_scoring(self.val, self.resume),
                *check_layout(self.model, dp_replicate=self.dp_replicate, ranks=self.ranks),
                *check_weights(self.model, resuming=self.resume is not None),
                *check_resume(self.resume, self.run, clean=self.clean, max_steps=None, counts_on=True),
                *check_shares(self.model, self._row_lengths),
                *check_suite(self.val),
            ]
        # With the counters set back, the checkpoint's step says nothing about how far this run is.
        counts_on = self.ckpt is None or not self.ckpt.skip_progress
        return [
            *check_deployment(self.deployment, self.model, has_slurm=self.slurm is not None),
            *check_requeue(self.slurm, self.ckpt, only_scores=False),
            *check_end(self.data, max_steps=self.max_steps),
            *check_weights(self.model, resuming=self.resume is not None, needs_first=may_start_anew(self.resume)),
            *check_ranks(self.model, self.data, dp_replicate=self.dp_replicate, ranks=self.ranks),
            *check_shares(self.model, self._row_lengths),
            *check_moments(self.model, self.optim),
            *check_schedule(self.scheduler, lr=self.optim.lr, total_steps=self.max_steps),
            *check_resume(self.resume, self.run, clean=self.clean, max_steps=self.max_steps, counts_on=counts_on),
            *check_skips(self.resume, self.ckpt, requeue=self.slurm is not None and self.slurm.requeue),
            *check_rounds(self.val, self.eval_snapshots),
            *check_data(self.data),
            *check_suite(self.val),
        ]
