"""`[run]` and `[deployment]`: where a run lies and which processes it gets."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from configs.base import BaseConfig, PlainName
from configs.errors import Fault

RUN_CONFIG = Path("configs") / "sft.json"
"""The resolved config of a run, relative to its directory: what makes a folder one."""


class RunConfig(BaseConfig):
    """`[run]`"""

    name: PlainName | None = Field(default=None)
    """Folder under output_dir. Unset: <data>--<model>--<8 hex digits>."""


class DeploymentConfig(BaseConfig):
    """`[deployment]`"""

    type: Literal["single_node"] = "single_node"
    """Processes on this machine."""

    num_train_gpus: int | None = Field(default=None, ge=1)
    """Worker processes, one per GPU. Unset: every visible GPU, or one process on a machine without."""

    gpus_per_node: int | None = Field(default=None, ge=1)
    """GPUs of the machine, which num_train_gpus may not exceed."""

    num_infer_gpus: int = Field(default=0, ge=0)
    """For prime-rl's files: 0, since no inference runs beside the training here."""

    num_infer_nodes: int = Field(default=0, ge=0)
    """For prime-rl's files: 0, as num_infer_gpus."""

    num_infer_replicas: int = Field(default=1, ge=0)
    """For prime-rl's files: 0 or 1; of no server, one replica is none."""

    timeout_seconds: int = Field(default=600, ge=1)
    """A collective that takes longer ends the run with an error."""

    stop_timeout_seconds: int = Field(default=300, ge=1)
    """After Ctrl-C, SIGTERM or SIGUSR1: time to finish the step and write the checkpoint. Then workers are killed."""

    def table_faults(self) -> list[Fault]:
        faults = []
        for key, most in (("num_infer_gpus", 0), ("num_infer_nodes", 0), ("num_infer_replicas", 1)):
            count = getattr(self, key)
            if count > most:
                message = (
                    f"{count} asks for inference, and none runs beside the training here: set it to {most} or leave "
                    "it out; held-out data is scored by [val]"
                )
                faults.append(Fault(key=key, message=message))
        asked, there = self.num_train_gpus, self.gpus_per_node
        if asked is not None and there is not None and asked > there:
            message = f"{asked} is more than gpus_per_node = {there}"
            faults.append(Fault(key="num_train_gpus", message=message))
        return faults
