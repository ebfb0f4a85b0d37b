"""Kills savers with SIGKILL and looks at what they leave. One process for all, because importing torch takes longest.

    python checkpoint_kill_worker.py FOLDER

At calls: a saver is killed at its first, second, ... call that touches the checkpoint folder, until one gets through.
At times: savers that save in a loop are killed at ten random moments.
Prints how many were killed in each way; fails on a folder that breaks a promise.
"""

import itertools
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from configs.checkpoint import CheckpointConfig
from trainer.checkpoint import Checkpointer, find_checkpoint, read_state
from trainer.parallel.mesh import Mesh

ONE_RANK = Mesh(
    device=torch.device("cpu"), rank=0, world_size=1, dp_rank=0, dp_size=1, device_mesh=None, host_group=None
)


def checkpointer(run_dir: Path) -> Checkpointer:
    return Checkpointer(run_dir, CheckpointConfig(keep_last=1), ONE_RANK)


def tensors_of(value: int) -> dict[str, torch.Tensor]:
    return {f"model.{i}": torch.full((1000,), float(value)) for i in range(5)}


def save(saver: Checkpointer, step: int, value: int) -> None:
    saver.save(step, tensors_of(value), {"value": value})


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid


def check(run_dir: Path) -> int:
    """The newest checkpoint is whole and holds one save's values throughout. Returns its value."""
    path = find_checkpoint(run_dir, None, lambda text: sys.exit(f"looks whole and is not: {text}"))
    value = read_state(path)["value"]
    loaded = tensors_of(-1)
    checkpointer(run_dir).load(path, loaded)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, torch.full((1000,), float(value))), (path, name, value)
    hidden = [other.name for other in (run_dir / "checkpoints").iterdir() if other.name.startswith(".")]
    assert hidden == [], hidden
    return value


def kill_at_call(folder: Path, count: int) -> None:
    """SIGKILL this process before its `count`-th call that names something under `folder`."""
    seen = itertools.count(1)

    def hook(event: str, arguments: tuple) -> None:
        if not (event.startswith(("os.", "shutil.")) or event == "open"):
            return
        touches = any(
            isinstance(argument, (str, Path)) and str(argument).startswith(str(folder)) for argument in arguments
        )
        if touches and next(seen) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def save_and_replace(run_dir: Path) -> None:
    """Step 1 is there: saves step 2, prunes step 1, then saves step 2 again as a resumed run would."""
    saver = checkpointer(run_dir)
    save(saver, 2, 2)
    saver.wait()
    saver = checkpointer(run_dir)
    save(saver, 2, 3)
    saver.wait()


def kill_at_every_call(root: Path) -> int:
    values = []
    for count in itertools.count(1):
        run_dir = root / f"run_{count}"
        saver = checkpointer(run_dir)
        save(saver, 1, 1)
        saver.wait()

        def work(run_dir: Path = run_dir, count: int = count) -> None:
            kill_at_call(run_dir / "checkpoints", count)
            save_and_replace(run_dir)

        _, status = os.waitpid(fork(work), 0)
        values.append(check(run_dir))
        if os.WIFEXITED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    # Progress only: a later kill never leaves an older checkpoint.
    assert values == sorted(values), values
    assert set(values) == {1, 2, 3}, values
    return len(values) - 1


def kill_at_random_times(run_dir: Path) -> int:
    def work() -> None:
        saver = checkpointer(run_dir)
        for value in itertools.count(last + 1):
            save(saver, value, value)

    saver = checkpointer(run_dir)
    save(saver, 1, 1)
    saver.wait()
    last = 1
    generator = random.Random(0)
    for _ in range(10):
        pid = fork(work)
        signal.sigtimedwait([], generator.uniform(0, 0.2))  # a random moment
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        value = check(run_dir)
        assert value >= last, (value, last)
        last = value
    assert last > 10, last  # so saves were going on
    return 10


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # a killed process loses no written page, and waiting for disks takes long
    root = Path(sys.argv[1])
    print(kill_at_every_call(root), kill_at_random_times(root / "times"))
