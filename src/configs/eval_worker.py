"""The root of the config of `eval-worker`."""

from pathlib import Path

from pydantic import Field

from configs.base import BaseConfig
from configs.checks import check_suite
from configs.errors import Fault
from configs.launch import SingleNodeConfig
from configs.monitor import LogConfig
from configs.validation import SuiteConfig


class EvalWorkerConfig(BaseConfig):
    """Scores the snapshots that a training run writes for it (`[eval_snapshots]`), on GPUs of its own."""

    run_dir: Path
    """Directory of the training run."""

    val: SuiteConfig | None = None
    """What to score. Unset: what the run's own `[val]` says."""

    poll_seconds: float = Field(default=2.0, gt=0)
    """Between two looks for a new snapshot."""

    max_idle_minutes: float | None = Field(default=None, gt=0)
    """End with an error when no snapshot has come for so long. Unset: wait for the run's last one, however long."""

    log: LogConfig = LogConfig()
    """Console and rank logs."""

    deployment: SingleNodeConfig = SingleNodeConfig()
    """Worker processes."""

    def run_faults(self) -> list[Fault]:
        faults = []
        if self.run_dir.exists() and not self.run_dir.is_dir():
            faults.append(Fault(key="run_dir", message=f"{self.run_dir} is not a folder"))
        if self.poll_seconds >= self.deployment.timeout_seconds:
            message = f"{self.poll_seconds:g} is not less than deployment.timeout_seconds, after which ranks give up"
            faults.append(Fault(key="poll_seconds", message=message))
        return [*faults, *check_suite(self.val)]
