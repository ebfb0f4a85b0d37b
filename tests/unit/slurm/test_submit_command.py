"""`sft` with [slurm]: what is checked, written and submitted, and what a second start makes of a job in the queue."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.cli import resolve
from configs.errors import ConfigError
from configs.launch import SlurmConfig, _limit_seconds
from configs.sft import SFTConfig
from trainer.run_dir import is_used
from trainer.sft import run_sft

_TOML = """
max_steps = 5
model.init = {}
data = {type = "fake", seq_len = 8, batch_size = 4, num_rows = 10}
slurm = {}
deployment = {type = "multi_node", num_nodes = 2, gpus_per_node = 2}

[model.arch]
model_type = "llama"
vocab_size = 64
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
"""


ONE_NODE = ["--deployment.type", "single_node", "--deployment.gpus-per-node", "None"]


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    config = tmp_path / "run.toml"
    config.write_text(_TOML)
    return ["@", str(config), "--output-dir", str(tmp_path / "outputs"), "--run.name", "one"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "outputs" / "one"


@pytest.fixture
def sft(argv: list[str], capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    """Runs the command with more arguments; gives its exit code and the lines of both streams."""

    def run(*arguments: str) -> tuple[int, list[str]]:
        code = run_sft([*argv, *arguments])
        captured = capsys.readouterr()
        return code, (captured.out + captured.err).splitlines()

    return run


def files_of(run_dir: Path) -> list[str]:
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file())


def config_of(run_dir: Path) -> SFTConfig:
    return SFTConfig.model_validate_json((run_dir / "configs" / "sft.json").read_text())


def end_job(cluster: Path, job_id: str) -> None:
    (cluster / f"job_{job_id}" / "state").unlink()


def test_a_dry_run_needs_no_cluster_and_can_be_submitted_by_hand(sft: Any, run_dir: Path) -> None:
    code, lines = sft("--dry-run", "--clean")
    script = run_dir / "slurm" / "sft.sbatch"
    assert code == 0 and files_of(run_dir) == ["configs/sft.json", "slurm/sft.sbatch"]
    assert lines[-2:] == [
        f"dry run: config written to {run_dir}/configs/sft.json, script to {script}; nothing was submitted",
        f"would submit: sbatch --parsable {script}",
    ]
    assert "plan: 4 workers, 1 micro-batch per worker and step" in lines
    config = config_of(run_dir)
    assert (config.dry_run, config.clean, config.slurm) == (False, False, SlurmConfig())
    assert str(run_dir) in script.read_text()


def test_a_job_is_submitted_once(sft: Any, run_dir: Path, fake_slurm: Path) -> None:
    """While it is in the queue, no other submission, local start or dry run changes what it will read."""
    code, lines = sft()
    assert code == 0
    assert lines[-2:] == [
        f"slurm: job 101 is queued, by {run_dir}/slurm/sft.sbatch",
        f"slurm: its output will be in {run_dir}/slurm/job_101*.log",
    ]
    assert files_of(run_dir) == [".lock", "configs/sft.json", "slurm/sft.sbatch", "slurm/submitted.json"]
    assert json.loads((fake_slurm / "job_101" / "options.json").read_text())["nodes"] == "2"
    assert config_of(run_dir).slurm == SlurmConfig()

    before = (run_dir / "configs" / "sft.json").read_text()
    for arguments in ((), ("--clean",), ("--no-slurm", "--deployment.type", "single_node"), ("--dry-run",)):
        code, lines = sft("--max-steps", "4", *arguments)
        assert code == 2 and lines[-1] == (
            f"run.name (flag --run.name): {run_dir} has job 101 in the queue (PENDING): wait for it, or end it with "
            "scancel 101"
        )
    assert (run_dir / "configs" / "sft.json").read_text() == before
    assert not (fake_slurm / "job_102").exists()

    # Cancelled before it began: the name is free again.
    end_job(fake_slurm, "101")
    code, lines = sft("--max-steps", "4")
    assert code == 0 and config_of(run_dir).max_steps == 4
    assert json.loads((run_dir / "slurm" / "submitted.json").read_text())["job_id"] == "102"

    # Where nobody can tell, a dry run still leaves alone what a job may read.
    (fake_slurm / "down").touch()
    code, lines = sft("--max-steps", "3", "--dry-run")
    assert code == 0 and config_of(run_dir).max_steps == 4
    assert lines[0] == (
        f"{run_dir} was submitted as job 102; squeue cannot tell whether it still waits or runs: "
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    )
    assert {"configs/dry_run/sft.json", "slurm/dry_run/sft.sbatch"} < set(files_of(run_dir))
    assert not is_used(run_dir)  # or the job would not start


def test_clean_is_done_when_the_job_is_submitted(sft: Any, run_dir: Path, fake_slurm: Path) -> None:
    """A job that is queued again must not delete what it wrote before."""
    sft()
    end_job(fake_slurm, "101")
    (run_dir / "logs" / "attempt_0").mkdir(parents=True)
    (run_dir / "checkpoints").mkdir()
    code, lines = sft()
    assert code == 2 and lines[-1].startswith(f"run.name (flag --run.name): {run_dir} is not empty")
    code, lines = sft("--clean")
    assert code == 0 and f"clean: deleted what {run_dir} held" in lines
    assert files_of(run_dir) == [".lock", "configs/sft.json", "slurm/sft.sbatch", "slurm/submitted.json"]
    assert config_of(run_dir).clean is False


def test_no_sbatch_here(sft: Any, run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, lines = sft()
    assert code == 2 and lines[-1].endswith(
        "run.toml): there is no sbatch on this machine's PATH: start the command where jobs are submitted, or leave it "
        "out"
    )
    assert not run_dir.exists()


def test_what_sbatch_says_is_shown(sft: Any, run_dir: Path, fake_slurm: Path) -> None:
    (fake_slurm / "refuse").write_text("invalid partition specified: gpu")
    code, lines = sft()
    script = run_dir / "slurm" / "sft.sbatch"
    assert code == 1
    assert lines[-1] == f"sbatch --parsable {script}: sbatch: error: invalid partition specified: gpu"
    (fake_slurm / "refuse").unlink()
    program = Path(shutil.which("sbatch") or "")
    content = program.read_text()
    program.write_text("#!/no/such/python\n")
    code, lines = sft()
    assert code == 1 and lines[-1] == f"sbatch --parsable {script}: No such file or directory"
    program.write_text(content)
    assert sft()[0] == 0  # nothing stands in the way of trying again


def test_what_a_job_alone_cannot_do(sft: Any, run_dir: Path, fake_slurm: Path) -> None:
    for step in (2, 4):
        (run_dir / "checkpoints" / f"step_{step}").mkdir(parents=True)
    (run_dir / "configs").mkdir()
    (run_dir / "configs" / "sft.json").write_text("{}")
    code, lines = sft("--resume.step", "2", "--slurm.requeue", "--ckpt")
    assert code == 2 and lines[-1] == (
        "resume.step (flag --resume.step): 2 is older than step_4, which the job would go on from when it is queued "
        "again (slurm.requeue): move the later checkpoints away, or fork the run by resume.dir"
    )
    (run_dir / "heldout.jsonl").write_text('{"text": "a"}\n')
    val = ("--val.sets", f'[{{"name": "h", "path": "{run_dir}/heldout.jsonl"}}]')
    code, lines = sft("--resume", "--max-steps", "0", *val)
    assert code == 2 and lines[-1].startswith(
        f"run.name (flag --run.name): {run_dir}/configs/sft.json is what a job reads, and there it is the training's"
    )
    assert (run_dir / "configs" / "sft.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        (["--slurm.job-name", "a\n#SBATCH --uid=0"], "slurm.job_name", "holds line ends or other control characters"),
        (["--slurm.sbatch-args", '["--qos=a", "b"]'], "slurm.sbatch_args", '"b" is not one option'),
        (["--slurm.sbatch-args", '["-p gpu"]'], "slurm.sbatch_args", '"-p gpu" is not one option'),
        (["--slurm.pre-run-command", "export HF_TOKEN=hf_abc"], "slurm.pre_run_command", "holds a secret"),
        (["--slurm.sbatch-args", '["--export=ALL,WANDB_API_KEY=abc"]'], "slurm.sbatch_args", "holds a secret"),
        (["--slurm.signal-seconds", "5"], "slurm.signal_seconds", "10"),
        (["--slurm.signal-seconds", "65536"], "slurm.signal_seconds", "65535"),
        (["--slurm.time", "2"], "slurm.signal_seconds", 'time = "2" is 120 s'),
        (["--no-slurm"], "deployment.type", '"multi_node" needs [slurm]'),
        (ONE_NODE, "deployment.num_train_gpus", "is missing"),
        ([*ONE_NODE, "--max-steps", "0"], "deployment.num_train_gpus", "is missing"),
        (["--slurm.requeue"], "slurm.requeue", "there is no [ckpt]"),
        (["--slurm.requeue", "--ckpt", "--max-steps", "0"], "slurm.requeue", "with max_steps = 0 nothing is kept"),
        (["--slurm.requeue", "--resume", "--ckpt.skip-optimizer"], "ckpt.skip_optimizer", "slurm.requeue"),
        (["--resume.auto", "--ckpt.skip-optimizer"], "ckpt.skip_optimizer", "resume.auto"),
        (["--resume.auto", "--resume.step", "3"], "resume.step", "give only one of them"),
        (["--resume.auto", "--no-model.init"], "model.init", "is missing"),
        (["--resume.auto", "--max-steps", "0"], "resume.auto", "leaves open which weights are scored"),
        (["--resume.auto", "--clean"], "clean", "would delete what [resume] goes on from"),
    ],
)
def test_faults_of_the_config(argv: list[str], arguments: list[str], key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([*argv, *arguments], SFTConfig, "sft")
    assert any(fault.key == key and message in fault.message for fault in caught.value.faults), caught.value.faults


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("30", 1800),
        ("30:05", 1805),
        ("1:00:05", 3605),
        ("1-2", 26 * 3600),
        ("1-2:03", 26 * 3600 + 180),
        ("1-02:03:04", 26 * 3600 + 184),
        ("0", None),
        ("UNLIMITED", None),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(time: str, seconds: int | None) -> None:
    assert _limit_seconds(time) == seconds


def test_a_run_that_is_started_again_has_a_name(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"run.name: is missing: the name of the run to go on with$"):
        resolve([*argv[:-2], "--resume.auto"], SFTConfig, "sft")


def test_secrets_may_be_read_in_the_job(argv: list[str]) -> None:
    command = 'export HF_TOKEN=$(cat ~/token)\nexport WANDB_API_KEY="$KEY" OTHER=3'
    resolved = resolve([*argv, "--slurm.pre-run-command", command], SFTConfig, "sft")
    assert resolved.config.slurm is not None and resolved.config.slurm.pre_run_command == command
