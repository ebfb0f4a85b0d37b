"""`[run]` and `[deployment]`: where a run lies and which processes it gets."""

from pydantic import Field

from configs.base import BaseConfig


class RunConfig(BaseConfig):
    """`[run]`"""

    name: str | None = Field(None, pattern=r"^\w[\w.-]*$")
    """Folder under output_dir. Unset: <data>--<model>--<8 hex digits>."""


class DeploymentConfig(BaseConfig):
    """`[deployment]`"""

    num_train_gpus: int | None = Field(None, ge=1)
    """Worker processes, one per GPU. Unset: every visible GPU, or one process on a machine without."""

    timeout_seconds: int = Field(600, ge=1)
    """A collective that takes longer ends the run with an error."""
