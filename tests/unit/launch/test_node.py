"""What an agent of a job makes of SLURM's variables and of the config that was submitted."""

from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.sft import SFTConfig
from trainer.node import JobNode, read_config, read_node, run_node
from trainer.run_dir import lay_out_job

SRUN = {"SLURM_JOB_ID": "81", "SLURM_NNODES": "4", "SLURM_NODEID": "2", "SLURMD_NODENAME": "gpu-17"}


def test_a_node_knows_its_place() -> None:
    node = read_node(SRUN)
    assert node == JobNode(job_id="81", restart=0, rank=2, num_nodes=4, name="gpu-17")
    assert node.notice == "job_81_0.json"
    again = read_node(SRUN | {"SLURM_RESTART_COUNT": "3", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3"})
    assert (again.restart, again.num_nodes, again.notice) == (3, 3, "job_81_3.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_JOB_ID": None}, "SLURM_JOB_ID is not set: srun starts it"),
        ({"SLURM_NNODES": None}, "SLURM_NNODES is not set"),
        ({"SLURM_NODEID": "two"}, "SLURM's variables cannot be read"),
        ({"SLURM_NTASKS": "32"}, "32 were started on 4 nodes; each starts its workers itself: --ntasks-per-node=1"),
    ],
)
def test_what_is_no_job_of_ours_is_named(changes: dict[str, str | None], message: str) -> None:
    environment = {name: value for name, value in (SRUN | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        read_node(environment)


@pytest.fixture
def submitted(tmp_path: Path):
    """Lays out a job with these tables; gives its run directory."""

    def lay_out(**tables) -> Path:
        deployment = {"type": "multi_node", "num_nodes": 4, "gpus_per_node": 1}
        values = {"data": {"type": "fake"}, "output_dir": tmp_path, "run": {"name": "run"}, "max_steps": 5}
        values |= {"deployment": deployment, "slurm": {}}
        lay_out_job(SFTConfig.model_validate(values | tables), "#!/bin/sh\n", print)
        return tmp_path / "run"

    return lay_out


def test_the_first_turn_is_as_submitted_and_later_ones_go_on(submitted) -> None:
    run_dir = submitted()
    assert read_config(run_dir, restart=0).resume is None
    later = read_config(run_dir, restart=1).resume
    assert later is not None and later.auto and later.dir is None and later.step is None


def test_a_step_to_go_on_from_is_the_first_turns_alone(submitted, tmp_path: Path) -> None:
    run_dir = submitted(resume={"step": 5}, max_steps=9)
    first, later = (read_config(run_dir, restart=restart).resume for restart in (0, 1))
    assert first is not None and later is not None
    assert (first.auto, first.step) == (False, 5) and (later.auto, later.step) == (True, None)
    fork = read_config(submitted(resume={"step": 5, "dir": tmp_path / "other"}), restart=1).resume
    assert fork is not None and (fork.auto, fork.step, fork.dir) == (True, 5, tmp_path / "other")


def test_a_run_directory_that_was_moved_is_not_used(submitted, tmp_path: Path, capsys) -> None:
    moved = submitted().rename(tmp_path / "moved")
    assert run_node([str(moved)], SRUN) == 2
    assert f"is the config of another directory ({tmp_path / 'run'})" in capsys.readouterr().err


def test_faults_of_the_start_are_messages(submitted, tmp_path: Path, capsys) -> None:
    assert run_node([], SRUN) == 2
    assert "it takes one argument, the run directory" in capsys.readouterr().err
    assert run_node([str(tmp_path)], SRUN) == 2
    assert "sft.json cannot be used: [Errno 2]" in capsys.readouterr().err
    assert run_node([str(submitted())], SRUN | {"SLURM_NNODES": "2"}) == 2
    assert "the job has 2 nodes, and the config asks for 4" in capsys.readouterr().err
