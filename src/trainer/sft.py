"""`sft`: trains. Resolves and checks the config, lays out the run directory, starts the workers and waits for them."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.command import launch_attempt, run_command, say

if TYPE_CHECKING:
    from configs.sft import SFTConfig


def main() -> None:
    """Entry point of the command."""
    code = run_sft(sys.argv[1:])
    from trainer.run import ignore_stop_signals

    ignore_stop_signals()
    sys.exit(code)


def run_sft(argv: list[str]) -> int:
    """Train as the command line says.

    Returns:
        exit code: 0 done or stopped as asked, 1 failed, 2 the config cannot run, 128 + n killed after signal n.
    """
    return run_command("sft", _config_class, _start_unless_ended, argv)


def _config_class() -> type["SFTConfig"]:
    from configs.sft import SFTConfig

    return SFTConfig


def _start_unless_ended(config: "SFTConfig") -> int:
    from trainer.launch import ended_by_signals

    with ended_by_signals():
        return _start(config)


def _start(config: "SFTConfig") -> int:
    from trainer.launch import WORKER_COMMAND, count_workers
    from trainer.run_dir import check_run_dir, fill_run_name, open_run_dir, run_dir_of, write_dry_run
    from trainer.slurm.submit import refuse_queued

    config = fill_run_name(config)
    run_dir = run_dir_of(config)
    check_run_dir(config)
    refuse_queued(run_dir, say)
    if config.slurm is not None:
        return _submit(config, run_dir)
    num_workers = count_workers(config.deployment)
    _check(config, run_dir, num_workers)
    if config.dry_run:
        say(f"dry run: config written to {write_dry_run(config)}; nothing was started")
        say(f"would start {num_workers} x: {shlex.join([*WORKER_COMMAND, str(run_dir)])}")
        return 0
    attempt = open_run_dir(config, say)
    say(f"run: {run_dir}, attempt {attempt.number}")
    return launch_attempt(attempt, config.deployment, num_workers, WORKER_COMMAND, webhook=config.monitors.webhook)


def _submit(config: "SFTConfig", run_dir: Path) -> int:
    """Leave the run to SLURM, after all the checks that a local one gets."""
    from trainer.run_dir import lay_out_job, write_dry_job
    from trainer.slurm.checks import check_job
    from trainer.slurm.render import render_script
    from trainer.slurm.submit import require_sbatch, submit, submit_command

    check_job(config, run_dir)
    script = render_script(config, run_dir, Path.cwd())
    if not config.dry_run:
        require_sbatch()
    assert config.ranks is not None, "SFTConfig.run_faults asks for the number with [slurm]"
    say("slurm: what is checked, and what has to be tokenised for it, is done here before the job is queued")
    _check(config, run_dir, config.ranks)
    if config.dry_run:
        path, script_path = write_dry_job(config, script)
        say(f"dry run: config written to {path}, script to {script_path}; nothing was submitted")
        say(f"would submit: {shlex.join(submit_command(script_path))}")
        return 0
    script_path = lay_out_job(config, script, say)
    job_id = submit(script_path, run_dir)
    say(f"slurm: job {job_id} is queued, by {script_path}")
    say(f"slurm: its output will be in {script_path.parent}/job_{job_id}*.log")
    return 0


def _check(config: "SFTConfig", run_dir: Path, num_workers: int) -> None:
    # Imports models and transformers, which take seconds.
    from trainer.monitors import check_monitors
    from trainer.preflight import preflight, preflight_scoring

    if config.only_scores:
        lines = preflight_scoring(config, run_dir=run_dir, world_size=num_workers, say=say)
    else:
        lines = preflight(config, run_dir=run_dir, world_size=num_workers, say=say).lines()
    check_monitors(config, say)
    for line in lines:
        say(line)
