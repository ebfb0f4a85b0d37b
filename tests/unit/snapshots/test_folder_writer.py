"""The one thread that writes checkpoints and snapshots: who waits for whom, and what a failure ends."""

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.checkpoint.folder_writer import FolderWriter
from trainer.errors import RunError
from trainer.parallel.mesh import one_rank_mesh


@pytest.fixture
def writer() -> FolderWriter:
    return FolderWriter(one_rank_mesh(torch.device("cpu")))


def tensors(value: float) -> dict[str, Tensor]:
    return {name: torch.full((3,), value) for name in ("model.a", "model.b", "optimizer.a")}


def wait_for(event: threading.Event) -> None:
    assert event.wait(60)


def test_tensors_of_one_step_are_copied_once(writer: FolderWriter) -> None:
    """So a snapshot neither waits for the checkpoint of its step nor takes memory of its own."""
    live = tensors(1.0)
    go = threading.Event()
    whole = writer.stage(4, live)
    writer.do(lambda: wait_for(go), in_background=True)
    part = writer.stage(4, {name: live[name] for name in ("model.a", "model.b")})  # would hang if it waited
    live["model.a"].fill_(2.0)
    assert part.keys() == {"model.a", "model.b"}
    assert part["model.a"] is whole["model.a"] and part["model.a"].tolist() == [1.0] * 3
    go.set()
    writer.wait()
    assert writer.stage(5, live)["model.a"].tolist() == [2.0] * 3


def test_more_tensors_of_a_step_wait_for_the_work_with_the_others(writer: FolderWriter) -> None:
    live, order = tensors(1.0), []
    writer.stage(4, {"model.a": live["model.a"]})
    writer.do(lambda: order.append("written"), in_background=True)
    live["model.a"].fill_(2.0)
    assert writer.stage(4, live)["model.a"].tolist() == [2.0] * 3
    assert order == ["written"]


def test_a_run_that_came_back_to_a_step_has_other_weights(writer: FolderWriter) -> None:
    writer.stage(4, tensors(1.0))
    writer.forget()
    assert writer.stage(4, tensors(2.0))["model.b"].tolist() == [2.0] * 3


def test_work_is_done_in_order(writer: FolderWriter) -> None:
    go, order = threading.Event(), []

    def slow() -> None:
        wait_for(go)
        order.append(1)

    writer.do(slow, in_background=True)
    writer.do(lambda: order.append(2), in_background=True)
    assert order == []
    go.set()
    writer.do(lambda: order.append(3), in_background=False)
    assert order == [1, 2, 3]


def test_nothing_follows_a_failure_until_it_is_told(writer: FolderWriter) -> None:
    done: list[int] = []

    def fail() -> None:
        raise RunError("the disk is full")

    writer.do(fail, in_background=True)
    writer.do(lambda: done.append(1), in_background=True)
    with pytest.raises(RunError, match="the disk is full"):
        writer.stage(5, tensors(1.0))
    assert done == []
    writer.do(lambda: done.append(2), in_background=True)
    writer.wait()
    assert done == [2]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_that_fails_leaves_nothing(writer: FolderWriter, tmp_path: Path) -> None:
    def refuse() -> None:
        raise RunError("no room")

    staged = writer.stage(1, tensors(1.0))
    for keyword in ({"before_writing": refuse}, {"before_commit": refuse}):
        with pytest.raises(RunError, match="no room"):
            writer.write(tmp_path / "step_1", step=1, tensors=staged, state={}, **keyword)
        assert list(tmp_path.iterdir()) == []
    writer.write(tmp_path / "step_1", step=1, tensors=staged, state={})
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
