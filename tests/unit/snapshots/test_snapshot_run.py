"""Training runs that leave snapshots: what is in them, and which are there after a stop, a kill, a step back."""

import json
import logging
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.checkpoint import ModelRecord, read_state
from trainer.errors import RunError
from trainer.snapshots import queue
from trainer.train import Trainer


def keep_weights(trainer: Trainer) -> dict[int, dict[str, Tensor]]:
    """The weights of a run after each step, filled while it runs."""
    kept: dict[int, dict[str, Tensor]] = {}

    class Keeper:
        def before_optimizer_step(self, context: Any) -> None:
            pass

        def after_optimizer_step(self, context: Any) -> None:
            kept[context.step + 1] = {name: t.detach().clone() for name, t in trainer.state.model_tensors().items()}

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    trainer.hooks.append(Keeper())
    return kept


@pytest.mark.parametrize("ckpt", [{"interval": 2}, {"interval": 3, "async_save": False}, None])
def test_snapshots_hold_the_weights_of_their_step_and_no_more(
    bench: Any, tensors_at: Callable[[Path], dict[str, Tensor]], ckpt: dict[str, Any] | None
) -> None:
    trainer = bench.trainer(max_steps=5, ckpt=ckpt)
    weights = keep_weights(trainer)
    bench.run(trainer)
    assert queue.waiting(bench.run_dir) == [2, 4, 5]
    assert queue.final_step(bench.run_dir) == 5
    for step in (2, 4, 5):
        path = queue.snapshot_path(bench.run_dir, step)
        found = tensors_at(path)
        assert found.keys() == weights[step].keys()
        assert all(torch.equal(found[name], weights[step][name]) for name in found)
        assert read_state(path).keys() == {"model", "wandb_id"}
        assert ModelRecord.of(read_state(path)).config["hidden_size"] == 16
    assert [record["step"] for record in bench.records() if "time/save_snapshot" in record] == [2, 4, 5]
    if ckpt is not None:
        whole = tensors_at(bench.run_dir / "checkpoints" / "step_5")
        assert len(whole) > len(weights[5])
        assert all(torch.equal(whole[name], tensor) for name, tensor in weights[5].items())


def test_without_the_table_there_is_no_folder(bench: Any) -> None:
    bench.run(bench.trainer(max_steps=1, eval_snapshots=None))
    assert not (bench.run_dir / "eval_snapshots").exists()


def test_a_last_step_at_the_interval_is_written_once(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = bench.trainer(max_steps=4)
    steps, write = [], trainer.snapshots._write
    monkeypatch.setattr(trainer.snapshots, "_write", lambda step, *rest: (steps.append(step), write(step, *rest)))
    bench.run(trainer)
    assert steps == [2, 4]


def test_the_oldest_go_when_too_many_wait(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trainer"):
        bench.run(bench.trainer(eval_snapshots={"interval": 1, "max_waiting": 2}))
    assert bench.names() == ["final.json", "step_5", "step_6"]
    assert [message for message in caplog.messages if "max_waiting" in message] == [
        f"eval_snapshots.max_waiting = 2: step_{step} will not be scored: deleted before eval-worker took it"
        for step in (1, 2, 3, 4)
    ]


def test_a_claimed_one_is_not_deleted_for_the_next(bench: Any) -> None:
    trainer = bench.trainer(eval_snapshots={"interval": 2, "max_waiting": 1})
    save = trainer.snapshots.save

    def claim_and_save(step: int, wandb_id: str | None) -> dict[str, float]:
        trainer.checkpointer.wait()
        if step == 4:
            queue.claim(bench.run_dir, 2)
        return save(step, wandb_id)

    trainer.snapshots.save = claim_and_save
    bench.run(trainer)
    assert bench.names() == ["final.json", "step_2.scoring", "step_6"]


def test_a_stopped_run_leaves_no_last_one(bench: Any) -> None:
    """Its worker waits for the run that goes on."""
    trainer = bench.trainer()
    rest = trainer._rest

    def stop_at_3(step: int) -> int:
        trainer.stopping |= step == 3
        return rest(step)

    trainer._rest = stop_at_3
    bench.run(trainer)
    assert bench.names("checkpoints") == ["step_3"]
    assert bench.names() == ["step_2"]
    assert not queue.is_over(bench.run_dir)

    bench.run(bench.trainer(resume={}))
    assert bench.names() == ["final.json", "step_2", "step_4", "step_6"]


def test_a_resumed_run_deletes_what_lies_ahead(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    bench.run(bench.trainer())
    queue.claim(bench.run_dir, 4)
    shutil.rmtree(bench.run_dir / "checkpoints" / "step_6")
    (bench.run_dir / "eval_snapshots" / ".step_6.tmp").mkdir()
    with caplog.at_level(logging.INFO, "trainer"):
        trainer = bench.trainer(resume={})
    assert bench.names() == ["step_2"]
    assert "snapshots after step 3 are of other weights now: deleted step_4, step_6" in caplog.messages
    bench.run(trainer)
    assert bench.names() == ["final.json", "step_2", "step_4", "step_6"]


def test_what_lies_ahead_goes_without_the_table_too(bench: Any) -> None:
    bench.run(bench.trainer())
    trainer = bench.trainer(resume={"step": 3}, eval_snapshots=None)
    assert bench.names() == ["final.json", "step_2"]
    assert queue.final_step(bench.run_dir) == 3  # a living worker ends: no more will come
    bench.run(trainer)
    bench.run(bench.trainer(resume={}, max_steps=8))
    assert bench.names() == ["final.json", "step_2", "step_6", "step_8"]


def test_a_longer_run_has_another_last_one(bench: Any) -> None:
    bench.run(bench.trainer(max_steps=3))
    assert queue.final_step(bench.run_dir) == 3
    trainer = bench.trainer(resume={}, max_steps=5)
    assert not queue.is_over(bench.run_dir)
    bench.run(trainer)
    assert bench.names() == ["final.json", "step_2", "step_3", "step_4", "step_5"]
    assert queue.final_step(bench.run_dir) == 5


def test_a_finished_run_resumed_with_nothing_to_do(bench: Any) -> None:
    """Whether the last one is scored and gone, was never written, or was scored before it was marked as the last."""
    folder = bench.run_dir / "eval_snapshots"
    bench.run(bench.trainer(max_steps=3, ckpt={"interval": 3}))

    def resumed() -> list[str]:
        bench.run(bench.trainer(max_steps=3, resume={}))
        return bench.names()

    assert resumed() == ["final.json", "step_2", "step_3"]
    for step in (2, 3):
        queue.discard(queue.snapshot_path(bench.run_dir, step))
    assert resumed() == ["final.json"]

    (folder / "final.json").unlink()  # killed after the checkpoint, before the snapshot
    assert resumed() == ["final.json", "step_3"]
    assert queue.final_step(bench.run_dir) == 3

    (folder / "final.json").unlink()
    assert queue.claim(bench.run_dir, 3)
    assert resumed() == ["final.json", "step_3.scoring"]

    (folder / "final.json").unlink()
    queue.discard(queue.claimed_path(bench.run_dir, 3))
    with (bench.run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "time/eval": 1.0}) + "\n")
    assert resumed() == ["final.json"]


def test_a_killed_runs_snapshot_is_made_up(
    bench: Any, tensors_at: Callable[[Path], dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 2 is written and its snapshot is not."""
    trainer = bench.trainer(ckpt={"interval": 2})

    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.snapshots, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        bench.run(trainer)
    trainer.checkpointer.wait()
    assert (bench.names("checkpoints"), bench.names()) == (["step_2"], [])

    trainer = bench.trainer(ckpt={"interval": 2}, resume={})
    trainer._begin(2)
    trainer.checkpointer.wait()
    trainer.close()
    assert bench.names() == ["step_2"]
    made_up = tensors_at(queue.snapshot_path(bench.run_dir, 2))
    whole = tensors_at(bench.run_dir / "checkpoints" / "step_2")
    assert made_up.keys() == {name for name in whole if name.startswith("model.")}
    assert all(torch.equal(made_up[name], whole[name]) for name in made_up)


def spoil(trainer: Trainer, *steps: int) -> None:
    """The loss of these steps is not finite, the first time they are taken."""
    left = set(steps)

    class Spoiler:
        def before_optimizer_step(self, context: Any) -> None:
            if context.step in left:
                left.discard(context.step)
                context.update_ok.zero_()

        def after_optimizer_step(self, context: Any) -> None:
            pass

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    trainer.hooks.append(Spoiler())


def test_a_run_that_goes_back_deletes_what_lies_ahead_before_it_cuts_the_record(bench: Any) -> None:
    """Steps 5 and 6 (from 1) are bad: the run goes back to step 3. The snapshot of step 4, which the worker scores just
    then, is of weights that it no longer has."""
    trainer = bench.trainer(nan_guard={"max_consecutive": 2}, max_steps=8)
    spoil(trainer, 4, 5)
    assert trainer.monitors is not None
    rewind, go_back, seen = trainer.monitors.rewind, trainer.snapshots.go_on_from, []

    def claim_and_go_back(step: int) -> None:
        trainer.checkpointer.wait()
        assert queue.claim(bench.run_dir, 4)
        go_back(step)

    def look_and_rewind(step: int) -> None:
        seen.append((step, bench.names()))
        rewind(step)

    trainer.snapshots.go_on_from = claim_and_go_back
    trainer.monitors.rewind = look_and_rewind
    bench.run(trainer)
    assert seen == [(3, ["step_2"])]
    assert bench.names() == ["final.json", "step_2", "step_4", "step_6", "step_8"]


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("ckpt", [{"interval": 2}, {"interval": 2, "async_save": False}, None])
def test_a_full_disk_ends_the_run_as_it_does_for_a_checkpoint(
    bench: Any, monkeypatch: pytest.MonkeyPatch, ckpt: dict[str, Any] | None
) -> None:
    """Field case R67: what was written before is as it was, nothing half-written is left, and the step is recorded."""
    trainer = bench.trainer(ckpt=ckpt)
    write = trainer.snapshots._write

    def full_at_4(step: int, *rest: Any) -> None:
        if step == 4:
            monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40, 1000))
        write(step, *rest)

    monkeypatch.setattr(trainer.snapshots, "_write", full_at_4)
    with pytest.raises(RunError, match=r"^snapshot step_4 could not be written to .*not enough disk space for a snap"):
        bench.run(trainer)
    assert bench.names() == ["step_2"]
    if ckpt is not None:
        assert bench.names("checkpoints") == ["step_2", "step_4"]
    assert [record["step"] for record in bench.records()][:5] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("ckpt", "what"), [(None, "a snapshot"), ({"interval": 2}, "a snapshot and a checkpoint")])
def test_a_disk_that_is_too_small_is_found_at_the_start(
    bench: Any, monkeypatch: pytest.MonkeyPatch, ckpt: dict[str, Any] | None, what: str
) -> None:
    # Between the size of a checkpoint and that of both.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 2**20 if ckpt is None else 3 * 2**19))
    with pytest.raises(RunError, match=rf"not enough disk space for {what} in .*eval_snapshots: it needs .* MiB"):
        bench.trainer(ckpt=ckpt)
