"""What a run was killed or stopped before it could record is recorded by the run that goes on from its checkpoint."""

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from configs.sft import SFTConfig
from configs.validation import ValConfig
from trainer.errors import RunError
from trainer.run import STOP_SIGNALS, Run, StopSignal
from trainer.train import Trainer
from trainer.validation import Validation

ARCH = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
ROUND = {"val/h/loss@8": 2.5}
PASSES = 3


class KilledHereError(Exception):
    """Stands for kill -9."""


class Round:
    """Stands for a validation of `PASSES` forward passes; `before_pass(n)` is called before each."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.before_pass: Callable[[int], None] = lambda number: None

    def run(
        self, model: Any, on_progress: Callable[[int, int], None], leave: Callable[[], bool], *, step: int
    ) -> dict[str, float] | None:
        for number in range(PASSES):
            self.before_pass(number)
            if leave():
                return None
            on_progress(number + 1, PASSES)
        return dict(ROUND)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


def make(folder: Path, **tables: Any) -> Trainer:
    """A run of 6 steps with checkpoints and, in place of a real validation, a `Round` at steps 3 and 6."""
    data = {"type": "fake", "seq_len": 8, "batch_size": 2, "num_rows": 100, "num_workers": 0}
    model = {"arch": ARCH, "init": {}, "compute_dtype": "float32"}
    values = {"model": model, "data": data, "output_dir": str(folder), "run": {"name": "one"}, "max_steps": 6}
    config = SFTConfig.model_validate(values | {"ckpt": {"interval": 3}} | tables)
    (folder / "one").mkdir(exist_ok=True)
    trainer = Trainer(config, Run(dir=folder / "one", attempt=0, stop=StopSignal()))
    trainer._validates = lambda step: step % 3 == 0
    trainer.validation = cast(Validation, Round())
    return trainer


def before_pass(trainer: Trainer, action: Callable[[int], None]) -> None:
    """Do `action(n)` before pass n of every validation of `trainer`."""
    assert isinstance(trainer.validation, Round)
    trainer.validation.before_pass = action


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

    def kill(number: int) -> None:
        if killed.state.progress.step == killed_at and number == 1:
            raise KilledHereError

    before_pass(killed, kill)
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


def stop_in_round(trainer: Trainer, step: int, number: int = 1) -> None:
    """Have a signal arrive before pass `number` of the validation of `step`."""

    def ask(at: int) -> None:
        if trainer.state.progress.step == step and at == number:
            trainer.run_info.stop._requested = True

    before_pass(trainer, ask)


@pytest.mark.parametrize("interval", [3, 4])
def test_a_stop_in_a_validation_drops_its_numbers_and_saves_the_step(
    tmp_path: Path, interval: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Field case R114: within the round, whether or not a checkpoint of the step was due; the resumed run makes the
    whole round up, and ends as a run that was never stopped."""
    stopped = make(tmp_path, ckpt={"interval": interval})
    stop_in_round(stopped, step=3)
    with caplog.at_level(logging.INFO, "trainer"):
        run(stopped)
    assert steps(tmp_path) == [0, 1, 2, 3]
    assert not {"time/val", *ROUND} & records(tmp_path)[3].keys()
    assert [path.name for path in (tmp_path / "one" / "checkpoints").iterdir()] == ["step_3"]
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("stop")]
    assert said == [
        "stopping: the validation of step 3 is left to the resumed run",
        "stopped on request after step 3 of 6: checkpoint at step 3 is written; go on with [resume]",
    ]

    run(make(tmp_path, resume={}))
    assert [record["step"] for record in records(tmp_path)] == [0, 1, 2, 3, 3, 4, 5, 6]
    assert [record["step"] for record in records(tmp_path) if "time/val" in record] == [3, 6]


@pytest.mark.parametrize("async_save", [False, True])
def test_a_stop_in_a_save_ends_two_steps_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    """Field case R114: the save under way is finished. The next step tells all ranks, which read it in the one after:
    that one is the last, and saved too."""
    stopped = make(tmp_path, ckpt={"interval": 3, "async_save": async_save}, max_steps=9)
    stopped._validates = lambda step: False
    save, write, asked = stopped.checkpointer.save, stopped.checkpointer._write, threading.Event()

    def write_and_ask(*arguments: Any, **options: Any) -> None:
        # To the main thread: another might take what is sent to the process, later than `asked` is seen.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        asked.set()
        write(*arguments, **options)

    def save_until_asked(*arguments: Any, **options: Any) -> None:
        save(*arguments, **options)
        assert asked.wait(60)  # or fast steps would be further on by then

    monkeypatch.setattr(stopped.checkpointer, "save", save_until_asked)
    monkeypatch.setattr(stopped.checkpointer, "_write", write_and_ask)
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    stopped.run_info.stop.install()
    try:
        run(stopped)
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    assert steps(tmp_path)[-1] == 5
    names = sorted(path.name for path in (tmp_path / "one" / "checkpoints").iterdir())
    assert names == ["step_3", "step_5"]

    run(make(tmp_path, resume={}, max_steps=9))
    assert steps(tmp_path)[-1] == 9


def test_a_stop_after_the_last_pass_keeps_the_round_and_takes_no_further_step(tmp_path: Path) -> None:
    stopped = make(tmp_path)
    assert isinstance(stopped.validation, Round)
    plain = stopped.validation.run

    def run_and_ask(*arguments: Any, **options: Any) -> dict[str, float] | None:
        metrics = plain(*arguments, **options)
        stopped.run_info.stop._requested = True
        return metrics

    stopped.validation.run = run_and_ask
    run(stopped)
    assert steps(tmp_path) == [0, 1, 2, 3]
    assert "time/val" in records(tmp_path)[3]


def test_a_stop_in_the_validation_at_start_saves_the_first_weights(tmp_path: Path) -> None:
    val = {"interval": 3, "eval_on_start": True, "sets": [{"name": "h", "path": str(tmp_path)}], "seq_lens": [8]}
    stopped = make(tmp_path)
    object.__setattr__(stopped.config, "val", ValConfig.model_validate(val))
    stop_in_round(stopped, step=0)
    run(stopped)
    assert [record.keys() & {"step", "time/val", "params/num_params"} for record in records(tmp_path)] == [
        {"step", "params/num_params"}
    ]
    assert (tmp_path / "one" / "checkpoints" / "step_0").exists()

    resumed = make(tmp_path, resume={})
    object.__setattr__(resumed.config, "val", ValConfig.model_validate(val))
    run(resumed)
    assert [record["step"] for record in records(tmp_path) if "time/val" in record] == [0, 3, 6]


def test_a_stop_in_a_validation_without_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stopped = make(tmp_path, ckpt=None)
    stop_in_round(stopped, step=3)
    with caplog.at_level(logging.INFO, "trainer"):
        run(stopped)
    assert steps(tmp_path) == [0, 1, 2, 3]
    assert "stopping: the validation of step 3 is left to nobody: there is no [ckpt]" in caplog.messages
    assert "stopped on request after step 3 of 6: no [ckpt]: lost" in caplog.messages


def test_a_fork_stopped_while_starting_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    """Else its directory could neither be resumed nor started anew."""
    run(make(tmp_path))
    (tmp_path / "one").rename(tmp_path / "other")
    fork = make(tmp_path, resume={"dir": str(tmp_path / "other"), "step": 3})
    fork.run_info.stop._requested = True
    run(fork)
    assert [path.name for path in (tmp_path / "one" / "checkpoints").iterdir()] == ["step_3"]
    run(make(tmp_path, resume={}))
    assert steps(tmp_path) == [3, 4, 5, 6]  # the validation of its first step first


@pytest.mark.parametrize("async_save", [False, True])
def test_a_failed_save_keeps_the_metrics_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    """Field case R67: the disk fills up before the save of step 6; the step was taken, and its line says so."""
    trainer = make(tmp_path, ckpt={"interval": 3, "async_save": async_save})
    Usage = namedtuple("Usage", "total used free")

    def disk_usage(path: object) -> Usage:
        return Usage(2**30, 2**30, 0 if trainer.state.progress.step == 6 else 2**30)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    with pytest.raises(RunError, match="not enough disk space for a checkpoint"):
        run(trainer)
    assert steps(tmp_path) == list(range(7))
    assert math.isfinite(records(tmp_path)[6]["loss/mean"])
    assert [path.name for path in (tmp_path / "one" / "checkpoints").iterdir()] == ["step_3"]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounting a small disk takes root")
def test_a_disk_of_1_mb_is_too_little_at_the_start(tmp_path: Path) -> None:
    """Field case R67: before the first step, and with what is needed and what there is."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False)
    if mounted.returncode:
        pytest.skip("this machine mounts nothing")
    try:
        with pytest.raises(RunError, match=r"not enough disk space for a checkpoint in .*: it needs .*, free are"):
            make(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
