"""What a job cannot do in its run directory although a local run could."""

from pathlib import Path

from configs.errors import ConfigError
from configs.launch import RUN_CONFIG
from configs.sft import SFTConfig
from trainer.checkpoint.folder import FOLDER_NAME, list_steps
from trainer.run_dir import is_used


def check_job(config: SFTConfig, run_dir: Path) -> None:
    """
    Raises:
        ConfigError: the job would overwrite the config of a training, or not find its way when it is queued again.
    """
    if config.only_scores and is_used(run_dir) and not config.clean:
        message = (
            f"{run_dir / RUN_CONFIG} is what a job reads, and there it is the training's: score its checkpoints in a "
            f"directory of their own, by --resume.dir {run_dir} and another run.name"
        )
        raise ConfigError.one("run.name", message)
    resume = config.resume
    if config.slurm is None or not config.slurm.requeue or resume is None or resume.dir or resume.step is None:
        return
    later = [step for step in list_steps(run_dir / FOLDER_NAME) if step > resume.step]
    if later:
        message = (
            f"{resume.step} is older than step_{later[-1]}, which the job would go on from when it is queued again "
            "(slurm.requeue): move the later checkpoints away, or fork the run by resume.dir"
        )
        raise ConfigError.one("resume.step", message)
