"""Failed allocations and time-outs, as workers tell of them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.faults import is_timeout, out_of_memory
from trainer.heartbeat import Heartbeat, Phase
from trainer.worker import _record

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.25 GiB is "
    "free. Process 7 has 138.40 GiB memory in use. Of the allocated memory 137.00 GiB is allocated by PyTorch"
)


def allocate_with_torch() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def allocate_with_numpy() -> None:
    np.ones(2**60, dtype=np.uint8)


def allocate_with_python() -> None:
    bytes(2**60)


@pytest.mark.parametrize("allocate", [allocate_with_torch, allocate_with_numpy, allocate_with_python])
def test_memory_of_the_host(allocate) -> None:
    """By the error that each library really raises."""
    heartbeat = Heartbeat()
    heartbeat.beat(Phase.OPTIMIZER, 12)
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    message = out_of_memory(caught.value, rank="3", doing=heartbeat.last)
    assert message is not None
    assert message.startswith("rank 3: out of memory (step 12, optimizer)")
    assert message.endswith("fewer processes on the machine")


def test_memory_of_a_gpu_with_what_was_free() -> None:
    assert out_of_memory(torch.OutOfMemoryError(CUDA), rank="0", doing=None) == (
        "rank 0: out of GPU memory, 2.00 GiB more were asked for, 1.25 GiB of 139.72 GiB were free; "
        'less takes: a smaller data.micro_batch_size (same result), model.ac = "full" (some slower), more GPUs; '
        "--dry-run estimates the need, docs/memory.md has the other levers"
    )


def test_other_failures_are_something_else() -> None:
    assert out_of_memory(RuntimeError("shapes do not match"), rank="0", doing=None) is None
    assert out_of_memory(ValueError("out of memory"), rank="0", doing=None) is None


def gloo(text: str) -> RuntimeError:
    return RuntimeError(f"[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:129] {text}")


def test_a_time_out_is_told_from_a_lost_connection() -> None:
    assert is_timeout(gloo("Timed out waiting 4000ms for send operation to complete"))
    assert not is_timeout(gloo("Connection closed by peer [127.0.0.1]:12345"))
    assert not is_timeout(RuntimeError("the download timed out"))
    outer = ValueError("another rank does not answer")
    outer.__cause__ = gloo("Timed out waiting 4000ms for recv operation to complete")
    assert is_timeout(outer)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            torch.OutOfMemoryError(CUDA),
            "run",
            "rank 5: out of GPU memory (step 3, forward and backward pass), 2.00 GiB",
        ),
        (gloo("Timed out waiting 9ms for it"), "timeout", "rank 5 waited for other ranks in vain (step 3, forward and"),
    ],
)
def test_what_the_launcher_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str, message: str
) -> None:
    monkeypatch.setenv("RANK", "5")
    heartbeat = Heartbeat()
    heartbeat.beat(Phase.FORWARD_BACKWARD, 3)
    path = tmp_path / "rank_5.error.json"
    _record(error, None, path, heartbeat)
    report = json.loads(path.read_text())
    assert report["kind"] == kind and report["message"].startswith(message)
    assert type(error).__name__ in report["text"]
