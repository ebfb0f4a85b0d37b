"""`[run]` and `[deployment]`: where a run lies and which processes it gets."""

from pathlib import Path

from pydantic import Field

from configs.base import BaseConfig, PlainName

RUN_CONFIG = Path("configs") / "sft.json"
"""The resolved config of a run, relative to its directory: what makes a folder one."""


class RunConfig(BaseConfig):
    """`[run]`"""

    name: PlainName | None = Field(default=None)
    """Folder under output_dir. Unset: <data>--<model>--<8 hex digits>."""


class DeploymentConfig(BaseConfig):
    """`[deployment]`"""

    num_train_gpus: int | None = Field(default=None, ge=1)
    """Worker processes, one per GPU. Unset: every visible GPU, or one process on a machine without."""

    timeout_seconds: int = Field(default=600, ge=1)
    """A collective that takes longer ends the run with an error."""

    stop_timeout_seconds: int = Field(default=300, ge=1)
    """After Ctrl-C, SIGTERM or SIGUSR1: time to finish the step and write the checkpoint. Then workers are killed."""
