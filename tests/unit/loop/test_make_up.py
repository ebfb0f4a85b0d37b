"""What a run was killed before it could record is recorded by the run that goes on from its checkpoint."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from configs.sft import SFTConfig
from trainer.run import Run, StopSignal
from trainer.train import Trainer

ARCH = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
ROUND = {"val/h/loss@8": 2.5, "time/val": 0.1}


class KilledHereError(Exception):
    """Stands for kill -9."""


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


def make(folder: Path, **tables: Any) -> Trainer:
    """A run of 6 steps with checkpoints and, in place of a real validation, `ROUND` at steps 3 and 6."""
    data = {"type": "fake", "seq_len": 8, "batch_size": 2, "num_rows": 100, "num_workers": 0}
    model = {"arch": ARCH, "init": {}, "compute_dtype": "float32"}
    values = {"model": model, "data": data, "output_dir": str(folder), "run": {"name": "one"}, "max_steps": 6}
    config = SFTConfig.model_validate(values | {"ckpt": {"interval": 3}} | tables)
    (folder / "one").mkdir(exist_ok=True)
    trainer = Trainer(config, Run(dir=folder / "one", attempt=0, stop=StopSignal()))
    trainer._validates = lambda step: step % 3 == 0
    trainer._validate = lambda: dict(ROUND)
    return trainer


def run(trainer: Trainer) -> None:
    try:
        trainer.run()
    finally:
        trainer.checkpointer.wait()
        trainer.close()


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "one" / "metrics.jsonl").read_text().splitlines()]


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in records(folder)]


@pytest.mark.parametrize("killed_at", [3, 6])
def test_killed_in_a_validation(tmp_path: Path, killed_at: int) -> None:
    """The checkpoint of the step is there and its line is not: the resumed run writes it, validation included."""
    killed = make(tmp_path)

    def validate() -> dict[str, float | int | str]:
        if killed.state.progress.step == killed_at:
            raise KilledHereError
        return dict(ROUND)

    killed._validate = validate
    with pytest.raises(KilledHereError):
        run(killed)
    assert steps(tmp_path) == list(range(killed_at))

    run(make(tmp_path, resume={}))
    assert steps(tmp_path) == list(range(7))
    made_up, whole = records(tmp_path)[killed_at], records(tmp_path)[3 if killed_at == 6 else 6]
    assert made_up["val/h/loss@8"] == 2.5
    assert made_up["progress/num_samples"] == 2 * killed_at
    assert math.isfinite(made_up["loss/mean"])
    assert whole.keys() - made_up.keys() == {"time/save_ckpt"}

    run(make(tmp_path, resume={}))
    assert steps(tmp_path) == list(range(7))


def test_a_stop_leaves_the_validation_to_the_resumed_run(tmp_path: Path) -> None:
    stopped = make(tmp_path)
    rest = stopped._rest

    def stop_at_3(step: int) -> int:
        stopped.stopping |= step == 3
        return rest(step)

    stopped._rest = stop_at_3
    run(stopped)
    assert steps(tmp_path) == [0, 1, 2, 3]
    assert "time/val" not in records(tmp_path)[3]

    run(make(tmp_path, resume={}))
    assert [record["step"] for record in records(tmp_path) if "time/val" in record] == [3, 6]


def test_a_fork_makes_nothing_up(tmp_path: Path) -> None:
    run(make(tmp_path))
    (tmp_path / "one").rename(tmp_path / "other")
    run(make(tmp_path, resume={"dir": str(tmp_path / "other"), "step": 3}))
    assert steps(tmp_path) == [4, 5, 6]


def test_a_stop_while_starting_takes_no_step(tmp_path: Path) -> None:
    """Only a checkpoint is written, so that the run can be resumed like any other that was stopped."""
    stopped = make(tmp_path)
    stopped.run_info.stop._requested = True
    run(stopped)
    assert not (tmp_path / "one" / "metrics.jsonl").exists()

    stopped = make(tmp_path, resume={})
    stopped.run_info.stop._requested = True
    run(stopped)
    assert not (tmp_path / "one" / "metrics.jsonl").exists()

    run(make(tmp_path, resume={}))
    assert steps(tmp_path) == list(range(7))
    assert "params/num_params" in records(tmp_path)[0]
