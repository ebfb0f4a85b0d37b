"""`resume.auto`: the newest whole checkpoint of the run; before there is one, that of `resume.dir` or a fresh start."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

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
AUTO = {"auto": True}


class KilledHereError(Exception):
    """Stands for kill -9."""


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


def run(
    folder: Path, name: str = "one", *, resume: Any = None, kill_at: int | None = None, interval: int = 3, **ckpt: Any
) -> Trainer:
    """Run 6 steps, or fewer and be killed before the step after `kill_at`; gives the ended trainer."""
    values = {
        "model": {"arch": ARCH, "init": {}, "compute_dtype": "float32"},
        "data": {"type": "fake", "seq_len": 8, "batch_size": 2, "num_rows": 100, "num_workers": 0},
        "optim": {"lr": 1e-2},
        "output_dir": str(folder),
        "run": {"name": name},
        "max_steps": 6,
        "ckpt": {"interval": interval} | ckpt,
        "resume": resume,
    }
    (folder / name).mkdir(exist_ok=True)
    trainer = Trainer(SFTConfig.model_validate(values), Run(dir=folder / name, attempt=0, stop=StopSignal()))
    take = trainer.loader.step

    def step(number: int) -> Any:
        if number == kill_at:
            trainer.checkpointer.wait()
            raise KilledHereError
        return take(number)

    trainer.loader.step = step  # type: ignore[method-assign]
    try:
        trainer.run()
    except KilledHereError:
        pass
    finally:
        trainer.close()
    return trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.canonical_parameters().items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def steps(folder: Path, name: str = "one") -> list[int]:
    return [json.loads(line)["step"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def damage(checkpoint: Path) -> None:
    """Cut a file of tensors short, which its manifest shows."""
    path = next(checkpoint.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        return weights(run(tmp_path_factory.mktemp("undisturbed")))


def test_a_job_that_is_queued_again(tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    """Field case R114: the same config each time; before there is a checkpoint afresh in the same folder, then on from
    the newest one. metrics.jsonl tells of one history."""
    first = run(tmp_path, resume=AUTO, kill_at=2)
    assert first.resumed_from is None and steps(tmp_path) == [0, 1]
    second = run(tmp_path, resume=AUTO, kill_at=5)
    assert second.resumed_from is None and steps(tmp_path) == [0, 1, 2, 3, 4]
    third = run(tmp_path, resume=AUTO)
    assert third.resumed_from == tmp_path / "one" / "checkpoints" / "step_3"
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5, 6]
    assert_same(weights(third), undisturbed)


def test_damaged_checkpoints_are_none(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, resume=AUTO, kill_at=5, interval=2)
    folder = tmp_path / "one" / "checkpoints"
    damage(folder / "step_4")
    assert run(tmp_path, resume=AUTO, kill_at=3, interval=2).resumed_from == folder / "step_2"
    damage(folder / "step_2")
    caplog.clear()
    last = run(tmp_path, resume=AUTO, interval=2)
    assert last.resumed_from is None
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split(" is damaged")[0] for text in warnings] == [
        f"checkpoint {folder / name}" for name in ("step_4", "step_2")
    ]
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5, 6]
    assert_same(weights(last), undisturbed)


def test_a_fork_skips_once(tmp_path: Path) -> None:
    """`ckpt.skip_*` are about the other run's checkpoint: moments of the fork's own are not lost at every start."""
    run(tmp_path, "base", kill_at=4)
    fork = {"dir": str(tmp_path / "base"), "auto": True}
    expected = weights(run(tmp_path, "whole", resume=fork, skip_optimizer=True, interval=1))
    kept = weights(run(tmp_path, "kept", resume=fork))

    first = run(tmp_path, "one", resume=fork, kill_at=5, skip_optimizer=True, interval=1)
    assert first.resumed_from == tmp_path / "base" / "checkpoints" / "step_3"
    second = run(tmp_path, "one", resume=fork, skip_optimizer=True, interval=1)
    assert second.resumed_from == tmp_path / "one" / "checkpoints" / "step_5"
    assert_same(weights(second), expected)
    assert not all(torch.equal(expected[name], kept[name]) for name in expected)
