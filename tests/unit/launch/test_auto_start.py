"""What is checked before a run starts that may go on by itself: `resume.auto`."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.sft import SFTConfig
from trainer.inspect.command import run_inspect
from trainer.preflight import preflight
from trainer.run_dir import check_run_dir, open_run_dir

_ARCH = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., SFTConfig]:
    def build(**values: Any) -> SFTConfig:
        base = {
            "data": {"type": "fake", "seq_len": 8, "batch_size": 2, "num_rows": 30},
            "model": {"arch": _ARCH, "init": {}},
            "output_dir": tmp_path / "outputs",
            "run": {"name": "one"},
            "max_steps": 10,
            "resume": {"auto": True},
        }
        return SFTConfig.model_validate(base | values)

    return build


def test_an_attempt_goes_on_in_its_folder_with_and_without_a_checkpoint(make: Callable[..., SFTConfig]) -> None:
    config = make()
    run_dir = config.output_dir / "one"
    for number in (0, 1):
        check_run_dir(config)
        attempt = open_run_dir(config, print)
        attempt.close()
        assert attempt.number == number
    # Killed before it could write a config, and after a job was submitted: still a run's.
    shutil.rmtree(run_dir / "configs")
    (run_dir / "slurm").mkdir()
    check_run_dir(config)
    # In a fork too, whose `dir` is another run.
    check_run_dir(make(resume={"auto": True, "dir": config.output_dir}))


def test_a_folder_of_no_run_is_left_alone(make: Callable[..., SFTConfig]) -> None:
    run_dir = make().output_dir / "one"
    run_dir.mkdir(parents=True)
    (run_dir / "thesis.tex").write_text("precious")
    with pytest.raises(
        ConfigError, match=r"run.name: .*one holds files of no run of ours, and resume.auto may start one"
    ):
        check_run_dir(make())


def test_the_plan_says_which_start_it_will_be(make: Callable[..., SFTConfig], tmp_path: Path) -> None:
    said: list[str] = []
    run_dir = tmp_path / "outputs" / "one"
    preflight(make(), run_dir=run_dir, world_size=1, say=said.append)
    assert said == [f"resume: no whole checkpoint in {run_dir}, so the run starts anew"]
    # The checkpoint to fork must be there.
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match=f"resume: there is no checkpoint in {other}/checkpoints"):
        preflight(make(resume={"auto": True, "dir": other}), run_dir=run_dir, world_size=1, say=said.append)


def test_rows_before_there_is_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`inspect-data --step` shows the rows of the run's first start."""
    arguments = ["--data.type", "fake", "--data.seq-len", "8", "--data.batch-size", "2", "--step", "1"]
    arguments += ["--model.arch", '{"model_type": "llama", "vocab_size": 64}', "--run.name", "one"]
    arguments += ["--output-dir", str(tmp_path), "--max-steps", "5"]
    shown = []
    for extra in ([], ["--resume.auto"]):
        assert run_inspect([*arguments, *extra]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and shown[0]
