"""Everything a checkpoint holds of a run, and how it is put back."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from configs.checkpoint import CheckpointConfig
from configs.sft import SFTConfig
from models.hf_config import config_to_dict
from trainer.checkpoint import Checkpointer, ModelRecord, read_state
from trainer.data.loader import RowLoader
from trainer.hooks import Hook
from trainer.nan_guard import NanGuard, SpikeMeter
from trainer.optim.adamw import AdamWBase
from trainer.parallel.data_parallel import GradSync
from trainer.weights.adapter_files import AdapterRecord

STATE_KEYS = ("progress", "data", "guard", "spikes", "hooks", "wandb_id", "metrics", "model")
"""What the state of a checkpoint holds."""


@dataclass
class Progress:
    """Counters of a run; `step` is the number of finished steps."""

    step: int = 0
    schedule_start: int = 0
    """Step at which the learning-rate schedule began."""

    num_samples: int = 0
    num_tokens: int = 0
    num_loss_tokens: int = 0
    num_padding_tokens: int = 0


def model_record(
    config: SFTConfig, model_config: PretrainedConfig, *, has_tokenizer: bool, adapters: AdapterRecord | None = None
) -> ModelRecord:
    """What checkpoints say about the model, so that they can be exported."""
    return ModelRecord(
        config=config_to_dict(model_config),
        tokenizer=config.tokenizer_name if has_tokenizer else None,
        compute_dtype=config.model.resolved_compute_dtype,
        adapters=adapters,
    )


def model_tensors(grad_sync: GradSync) -> dict[str, Tensor]:
    """Master weights as checkpoints name them, `model.<name>`; not what is frozen beside adapters."""
    return {f"model.{name}": grad_sync.as_global(name, master) for name, master in grad_sync.masters.items()}


class TrainState:
    """The parts of a run that live on: tensors for DCP, the rest as JSON."""

    def __init__(
        self, grad_sync: GradSync, optimizer: AdamWBase, loader: RowLoader, guard: NanGuard, hooks: Sequence[Hook]
    ) -> None:
        self.progress = Progress()
        self.guard = guard
        self.loss_spike = SpikeMeter()
        self.grad_norm_spike = SpikeMeter()
        self._grad_sync = grad_sync
        self._optimizer = optimizer
        self._loader = loader
        self._hooks = hooks

    def model_tensors(self) -> dict[str, Tensor]:
        """Those of `model_tensors`."""
        return model_tensors(self._grad_sync)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint, views of the live ones."""
        tensors = self.model_tensors()
        for kind, moments in self._optimizer.moments().items():
            for name, moment in moments.items():
                tensors[f"optimizer.{kind}.{name}"] = self._grad_sync.as_global(name, moment)
        for name, count in self._optimizer.step_counts().items():
            tensors[f"optimizer.step.{name}"] = count
        return tensors

    def state_dict(self) -> dict[str, Any]:
        """The rest, as JSON. Counters must be those of the finished step: read its metrics first."""
        return {
            "progress": asdict(self.progress),
            "data": self._loader.state_dict(self.progress.step),
            "guard": self.guard.state_dict(),
            "spikes": [self.loss_spike.state_dict(), self.grad_norm_spike.state_dict()],
            "hooks": [hook.state_dict() for hook in self._hooks],
        }

    def load_state_dict(self, state: dict[str, Any], config: CheckpointConfig) -> None:
        """Put everything but tensors back, less what `ckpt.skip_*` leaves out."""
        saved = Progress(**state["progress"])
        self.progress = Progress() if config.skip_progress else saved
        if config.skip_scheduler:
            self.progress.schedule_start = self.progress.step
        data = self._loader.first_state() if config.skip_dataloader else state["data"]
        self._loader.load_state_dict(data, self.progress.step)
        self.guard.load_state_dict(state["guard"])
        self.loss_spike.load_state_dict(state["spikes"][0])
        self.grad_norm_spike.load_state_dict(state["spikes"][1])
        for hook, hook_state in zip(self._hooks, state["hooks"], strict=True):
            hook.load_state_dict(hook_state)

    def restore(self, checkpointer: Checkpointer, path: Path, config: CheckpointConfig) -> dict[str, Any]:
        """Put everything back from the checkpoint at `path`, less what `ckpt.skip_*` leaves out. Collective.

        Returns:
            all that it holds besides tensors.

        Raises:
            RunError: it is damaged, or of another model.
        """
        saved = read_state(path)
        if config.skip_optimizer:
            self._optimizer.reset()
            checkpointer.load(path, self.model_tensors(), ignore=("optimizer.",))
        else:
            checkpointer.load(path, self.tensors())
        self.load_state_dict(saved, config)
        self._grad_sync.publish()
        return saved
