"""The sbatch scripts: rendered, read by bash, and run by programs that stand for SLURM (tests/fake_slurm)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainer.slurm.template as template_module
from configs.errors import ConfigError
from configs.sft import SFTConfig
from trainer.slurm import render
from trainer.slurm.render import render_script

ROOT = Path(__file__).parents[3]
TWO_NODES = {"type": "multi_node", "num_nodes": 2, "gpus_per_node": 4}

# Stands for the node's agent: says where it was started and with what, then ends as it is told, after so many USR1.
AGENT = """
import json, os, signal, sys
from pathlib import Path

folder, node = Path(sys.argv[1]), os.environ["SLURM_PROCID"]
plan = json.loads((folder / "plan.json").read_text())
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append("USR1"))
print("from node", node, os.environ.get("FROM_COMMAND"), flush=True)
(folder / f"ready_{node}_0").touch()
for count in range(plan["waits"]):
    while len(asked) <= count:
        signal.sigtimedwait([], 0.01)
    (folder / f"ready_{node}_{count + 1}").touch()
sys.exit(plan["codes"][int(node)])
"""


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., SFTConfig]:
    def build(slurm: dict[str, Any], deployment: dict[str, Any] | None = None, folder: str = "outputs") -> SFTConfig:
        values = {"data": {"type": "fake"}, "output_dir": tmp_path / folder, "run": {"name": "one"}, "slurm": slurm}
        return SFTConfig.model_validate(
            values | {"deployment": deployment or {"type": "single_node", "num_train_gpus": 2}}
        )

    return build


def script_of(config: SFTConfig) -> str:
    return render_script(config, config.output_dir / "one", Path("/some where"))


def options_of(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


class Job:
    """A job in the fake cluster whose agents do as they are told."""

    def __init__(
        self,
        config: SFTConfig,
        monkeypatch: pytest.MonkeyPatch,
        *,
        waits: int = 0,
        codes: tuple[int, ...] = (0, 0),
    ) -> None:
        self.run_dir = config.output_dir / "one"
        (self.run_dir / "slurm").mkdir(parents=True)
        (self.run_dir / "plan.json").write_text(json.dumps({"waits": waits, "codes": codes}))
        agent = self.run_dir / "agent.py"
        agent.write_text(AGENT)
        monkeypatch.setattr(render, "NODE_COMMAND", (sys.executable, "-S", "-E", str(agent)))
        path = self.run_dir / "slurm" / "sft.sbatch"
        path.write_text(render_script(config, self.run_dir, self.run_dir))
        command = ["sbatch", "--parsable", path]
        self.id = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        self._process = subprocess.Popen(["run_job", self.id], start_new_session=True)

    def end(self, *signals: int) -> int:
        """Wait for the agents where signals are to come, send them, and give the job's exit code."""
        try:
            for count, signum in enumerate(signals):
                while len(list(self.run_dir.glob(f"ready_*_{count}"))) < 2:
                    assert self._process.poll() is None, self.log()
                    time.sleep(0.01)
                self._process.send_signal(signum)
            return self._process.wait(timeout=60)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def log(self, node: int | None = None) -> str:
        name = f"job_{self.id}.log" if node is None else f"job_{self.id}_node_{node}.log"
        return (self.run_dir / "slurm" / name).read_text()


@pytest.mark.parametrize("deployment", [None, TWO_NODES], ids=["single_node", "multi_node"])
def test_options_of_the_shipped_templates(config: Callable[..., SFTConfig], deployment: Any) -> None:
    bare = config({}, deployment)
    slurm = f"{bare.output_dir}/one/slurm"
    nodes = ["--nodes=1", "--ntasks-per-node=1", "--gres=gpu:2"]
    if deployment:
        nodes = ["--nodes=2", "--ntasks-per-node=1", "--gres=gpu:4", "--exclusive", "--mem=0"]
    common = [
        "--chdir='/some where'",
        f"--output={slurm}/job_%j.log",
        "--open-mode=append",
    ]
    assert options_of(script_of(bare)) == [
        *nodes,
        "--job-name=one",
        *common,
        "--signal=B:USR1@120",
        "--no-requeue",
    ]
    full = {
        "job_name": "a job",
        "partition": "gpu",
        "account": "me",
        "time": "24:00:00",
        "nodelist": "n[1-4]",
        "exclude": "n7",
        "requeue": True,
        "signal_seconds": 300,
        "sbatch_args": ["--qos=high", "--comment=two words"],
        "pre_run_command": "module load x",
    }
    assert options_of(script_of(config(full, deployment))) == [
        *nodes,
        "--job-name='a job'",
        *common,
        "--signal=B:USR1@300",
        "--requeue",
        "--partition=gpu",
        "--account=me",
        "--time=24:00:00",
        "--nodelist='n[1-4]'",
        "--exclude=n7",
        "--qos=high",
        "'--comment=two words'",
    ]
    for slurm in ({}, full):
        assert template_module.shell_fault(script_of(config(slurm, deployment))) is None


def test_words_of_the_config_stay_words(
    config: Callable[..., SFTConfig], fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case R54: a job whose command was cut in two by a space ran nothing and was COMPLETED. Paths and names with
    everything that a shell, sbatch or a log's name pattern would take for its own."""
    slurm = {"job_name": "it's $(touch name) `x` #1", "pre_run_command": "export FROM_COMMAND='a  $b'\ntrue"}
    job = Job(config(slurm, TWO_NODES, "it's 100%j $(touch path)"), monkeypatch)
    assert job.end() == 0, job.log()
    assert [job.log(node) for node in (0, 1)] == [f"from node {node} a  $b\n" for node in (0, 1)]
    options = json.loads((fake_slurm / f"job_{job.id}" / "options.json").read_text())
    assert options["job-name"] == "it's $(touch name) `x` #1"
    assert sorted(path.name for path in job.run_dir.iterdir()) == [
        "agent.py",
        "plan.json",
        "ready_0_0",
        "ready_1_0",
        "slurm",
    ]


@pytest.mark.parametrize(
    ("slurm", "codes", "signals", "code", "requeued"),
    [
        # Field case R114: before the time limit the run stops with a checkpoint, and is queued again.
        ({"requeue": True}, (0, 0), (signal.SIGUSR1,), 0, True),
        ({"requeue": True}, (0, 0), (signal.SIGTERM, signal.SIGUSR1), 0, True),
        ({"requeue": True}, (143, 0), (signal.SIGUSR1,), 143, True),  # too slow to stop, and killed
        ({"requeue": True}, (0, 1), (signal.SIGUSR1,), 1, False),  # a failure
        ({"requeue": True}, (0, 0), (signal.SIGTERM,), 0, False),  # cancelled, or preempted: SLURM decides
        ({"requeue": False}, (0, 0), (signal.SIGUSR1,), 0, False),
        ({"requeue": True}, (0, 0), (), 0, False),  # done
        ({"requeue": True}, (2, 0), (), 2, False),  # field case R54: never COMPLETED
    ],
)
def test_how_a_job_ends(
    config: Callable[..., SFTConfig],
    fake_slurm: Path,
    monkeypatch: pytest.MonkeyPatch,
    slurm: dict[str, Any],
    codes: tuple[int, int],
    signals: tuple[int, ...],
    code: int,
    requeued: bool,
) -> None:
    """Agents get USR1 for either signal (srun would kill them for TERM), and the job has their exit code."""
    (fake_slurm / "no_requeue").touch()  # only whether it is asked for
    job = Job(config(slurm, TWO_NODES), monkeypatch, waits=len(signals), codes=codes)
    # It is refused here, which the job must not pass over.
    assert job.end(*signals) == (1 if requeued else code), job.log()
    assert ("scontrol: error: Requested operation is presently disabled" in job.log()) is requeued
    assert job.log().count("the run is asked to stop") == len(signals)


def test_a_failing_pre_run_command_ends_the_job(
    config: Callable[..., SFTConfig], fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(config({"pre_run_command": "true\n(exit 7)"}, TWO_NODES), monkeypatch)
    assert job.end() == 7
    assert job.log(1) == "slurm.pre_run_command failed with exit code 7\n"
    assert not (job.run_dir / "ready_0_0").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not a file"),
        ("#!/bin/bash\n{% if %}\n", "own.j2, line 2: Expected an expression, got 'end of statement block'"),
        ("#!/bin/bash\n{{ gpus }}\n", "own.j2: 'gpus' is undefined"),
        ("#!/bin/bash\n{{ num_nodes / 0 }}\n", "own.j2: division by zero"),
        ('#!/bin/bash\n{% include "own.j2" %}\n', "own.j2: maximum recursion depth exceeded"),
        ('#!/bin/bash\n{% include "none.j2" %}\n', "own.j2: there is no template none.j2 to include"),
        ("{{ run_dir.__class__.__mro__ }}", "own.j2: access to attribute '__class__' of 'str' object is unsafe."),
        ("\n#!/bin/bash\n", "own.j2: the script has to begin with"),
        ("#!/bin/bash\nif true\n", "own.j2 gives a script that bash cannot read: "),
        ("#!/bin/bash\nexport WANDB_API_KEY=abc\n", "puts a secret into the script"),
    ],
)
def test_a_faulty_template_is_named(
    config: Callable[..., SFTConfig], tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "own.j2"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        script_of(config({"template_path": path}))
    (fault,) = caught.value.faults
    assert fault.key == "slurm.template_path" and message in fault.message


def test_a_template_of_the_user_may_use_the_shipped_parts(config: Callable[..., SFTConfig], tmp_path: Path) -> None:
    path = tmp_path / "own.j2"
    parts = "".join(f'{{% include "parts/{name}.j2" %}}\n' for name in ("options", "run.sh"))
    path.write_text("#!/bin/bash\n#SBATCH --nodes={{ num_nodes }}\n" + parts)
    script = script_of(config({"template_path": path}))
    assert options_of(script)[:2] == ["--nodes=1", "--job-name=one"] and "srun" in script


def test_templates_are_part_of_the_package() -> None:
    """So an installed one has them; in the repository they lie at the root."""
    assert template_module.SHIPPED_TEMPLATES.parent == Path(render.__file__).parent
    shipped = {path.name for path in template_module.SHIPPED_TEMPLATES.rglob("*.j2")}
    assert shipped == {"single_node.sbatch.j2", "multi_node.sbatch.j2", "options.j2", "run.sh.j2"}
    assert template_module.SHIPPED_TEMPLATES.resolve() == ROOT / "templates"


def test_a_pre_run_command_that_bash_cannot_read(config: Callable[..., SFTConfig]) -> None:
    with pytest.raises(ConfigError, match=r"slurm.pre_run_command: bash cannot read it: .*unexpected EOF"):
        script_of(config({"pre_run_command": "echo 'never ended"}))
