"""The sbatch script of a run."""

import shlex
import sys
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.launch import MultiNodeConfig, SlurmConfig
from configs.safe_text import has_secret
from configs.sft import SFTConfig
from trainer.run_dir import JOB_FOLDER
from trainer.slurm.template import render_template, shell_fault

NODE_COMMAND = (sys.executable, "-P", "-m", "trainer.node")


def render_script(config: SFTConfig, run_dir: Path, work_dir: Path) -> str:
    """The script that sbatch gets.

    Args:
        config: with [slurm] and a name.
        run_dir: the run's directory.
        work_dir: where the command was called: relative paths of the config count from there, in the job too.

    Raises:
        ConfigError: the template, or what the config puts into it, is faulty.
    """
    slurm = config.slurm
    assert slurm is not None, "a job is asked for"
    fault = None if slurm.pre_run_command is None else shell_fault(slurm.pre_run_command)
    if fault is not None:
        raise ConfigError.one("slurm.pre_run_command", f"bash cannot read it: {fault}")
    several = isinstance(config.deployment, MultiNodeConfig)
    name = "multi_node.sbatch.j2" if several else "single_node.sbatch.j2"
    script = render_template(slurm.template_path, name, _variables(config, slurm, run_dir, work_dir))
    if has_secret(script):
        message = "puts a secret into the script, which others may read; jobs inherit the environment of this command"
        raise ConfigError.one("slurm.template_path", message)
    return script


def _variables(config: SFTConfig, slurm: SlurmConfig, run_dir: Path, work_dir: Path) -> dict[str, Any]:
    """What templates may use, as docs/slurm.md lists it."""
    deployment = config.deployment
    ranks = config.ranks
    assert ranks is not None, "SFTConfig.run_faults asks for the number with [slurm]"
    num_nodes = deployment.num_nodes if isinstance(deployment, MultiNodeConfig) else 1
    folder = run_dir.absolute() / JOB_FOLDER
    for path in (folder, work_dir):
        if not str(path).isprintable():
            raise ConfigError.one("output_dir", f"{path} has characters that an sbatch script cannot hold")
    return {
        "job_name": slurm.job_name or config.run.name,
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.time,
        "nodelist": slurm.nodelist,
        "exclude": slurm.exclude,
        "sbatch_args": slurm.sbatch_args,
        "pre_run_command": slurm.pre_run_command,
        "requeue": slurm.requeue,
        "signal_seconds": slurm.signal_seconds,
        "num_nodes": num_nodes,
        "gpus_per_node": ranks // num_nodes,
        "run_dir": str(run_dir.absolute()),
        "work_dir": str(work_dir),
        "job_log": f"{_literal(folder)}/job_%j.log",
        "node_log": f"{_literal(folder)}/job_%j_node_%n.log",
        "node_command": _node_command(slurm, run_dir),
        "wait_seconds": deployment.timeout_seconds,
    }


def _literal(path: Path) -> str:
    """The path in a file name pattern of SLURM."""
    return str(path).replace("%", "%%")


def _node_command(slurm: SlurmConfig, run_dir: Path) -> str:
    """Shell commands of every node. The shell becomes the agent, so that signals reach it and its exit code counts."""
    agent = f"exec {shlex.join([*NODE_COMMAND, str(run_dir.absolute())])}"
    if slurm.pre_run_command is None:
        return agent
    check = '[ "$code" -eq 0 ] || { echo "slurm.pre_run_command failed with exit code $code" >&2; exit "$code"; }'
    return f"{slurm.pre_run_command}\ncode=$?\n{check}\n{agent}"
