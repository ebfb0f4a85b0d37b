"""`[run]`, `[deployment]` and `[slurm]`: where a run lies and which processes it gets, and from whom."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from configs.base import BaseConfig, PlainName
from configs.errors import Fault
from configs.safe_text import has_secret

RUN_CONFIG = Path("configs") / "sft.json"
"""The resolved config of a run, relative to its directory: what makes a folder one."""


class RunConfig(BaseConfig):
    """`[run]`"""

    name: PlainName | None = Field(default=None)
    """Folder under output_dir. Unset: <data>--<model>--<8 hex digits>."""


class WorkersConfig(BaseConfig):
    """What the deployments share."""

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
        return faults


class SingleNodeConfig(WorkersConfig):
    """`[deployment]` with `type = "single_node"`: processes on one machine."""

    type: Literal["single_node"] = "single_node"
    """Processes on one machine: this one, or with `[slurm]` the one that the job gets."""

    num_train_gpus: int | None = Field(default=None, ge=1)
    """Worker processes, one per GPU. Unset: every visible GPU, or one process on a machine without; with `[slurm]`
    gpus_per_node."""

    gpus_per_node: int | None = Field(default=None, ge=1)
    """GPUs of the machine, which num_train_gpus may not exceed."""

    def table_faults(self) -> list[Fault]:
        faults = super().table_faults()
        asked, there = self.num_train_gpus, self.gpus_per_node
        if asked is not None and there is not None and asked > there:
            message = f"{asked} is more than gpus_per_node = {there}"
            faults.append(Fault(key="num_train_gpus", message=message))
        return faults


class MultiNodeConfig(WorkersConfig):
    """`[deployment]` with `type = "multi_node"`: processes on several machines, which `[slurm]` finds."""

    type: Literal["multi_node"]
    """Processes on several machines, which `[slurm]` finds."""

    num_nodes: int = Field(default=2, ge=1)
    """Machines."""

    gpus_per_node: int = Field(default=8, ge=1)
    """Worker processes on each machine, one per GPU."""

    nodes_per_fsdp_group: int | None = Field(default=None, ge=1)
    """Machines that share one copy of the weights: another way to give model.dp_replicate."""

    def table_faults(self) -> list[Fault]:
        faults = super().table_faults()
        if self.nodes_per_fsdp_group is not None and self.num_nodes % self.nodes_per_fsdp_group:
            message = f"{self.nodes_per_fsdp_group} does not divide num_nodes = {self.num_nodes}"
            faults.append(Fault(key="nodes_per_fsdp_group", message=message))
        return faults


DeploymentConfig = Annotated[SingleNodeConfig | MultiNodeConfig, Field(discriminator="type")]


def _limit_seconds(time: str) -> int | None:
    """A time limit as sbatch reads it: minutes[:seconds], hours:minutes:seconds, or days-hours[:minutes[:seconds]]; 0
    is none. None for that and for what this does not know."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds or None


class SlurmConfig(BaseConfig):
    """`[slurm]`: submit the run as a SLURM job instead of starting it here."""

    job_name: str | None = Field(default=None, min_length=1)
    """Name of the job. Unset: the run's."""

    partition: str | None = Field(default=None, min_length=1)
    """Partition. Unset: the cluster's default."""

    account: str | None = Field(default=None, min_length=1)
    """Account that is charged."""

    time: str | None = Field(default=None, min_length=1)
    """Time limit, as sbatch takes it: "24:00:00"."""

    nodelist: str | None = Field(default=None, min_length=1)
    """Nodes to run on."""

    exclude: str | None = Field(default=None, min_length=1)
    """Nodes not to run on."""

    pre_run_command: str | None = Field(default=None, min_length=1)
    """Shell commands on every node before the workers start, such as `module load`."""

    template_path: Path | None = None
    """A jinja2 template of the sbatch script. Unset: templates/single_node.sbatch.j2 or multi_node.sbatch.j2."""

    requeue: bool = False
    """When the time limit or a preemption stops the job, queue it again; it goes on from its newest checkpoint."""

    signal_seconds: int = Field(default=120, ge=10, le=65535)
    """So long before the time limit the run is asked to stop: it ends its step and writes a checkpoint."""

    sbatch_args: list[str] = Field(default_factory=list)
    """Further options of sbatch, such as "--qos=high" or "--cpus-per-gpu=8"."""

    def table_faults(self) -> list[Fault]:
        words = {
            name: getattr(self, name) for name in ("job_name", "partition", "account", "time", "nodelist", "exclude")
        }
        lines = [(name, word) for name, word in words.items() if word is not None]
        lines += [("sbatch_args", argument) for argument in self.sbatch_args]
        faults = []
        for key, text in lines:
            # A line end would begin an option, or a command, of its own in the script.
            if not text.isprintable():
                faults.append(Fault(key=key, message="holds line ends or other control characters"))
            elif key == "sbatch_args" and re.match(r"-[^\s=]+(=|$)", text) is None:
                faults.append(Fault(key=key, message=f'"{text}" is not one option: write it as "--name=value"'))
        seconds = None if self.time is None else _limit_seconds(self.time)
        if seconds is not None and seconds <= self.signal_seconds:
            message = (
                f'time = "{self.time}" is {seconds} s, so the run would be asked to stop as soon as it begins: give it '
                f"less than that, 10 at least"
            )
            faults.append(Fault(key="signal_seconds", message=message))
        for key, text in [*lines, ("pre_run_command", self.pre_run_command or "")]:
            if has_secret(text):
                message = "holds a secret, and would be written into config and script: jobs inherit the environment"
                faults.append(Fault(key=key, message=message))
        return faults
