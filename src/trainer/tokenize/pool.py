"""Worker processes: tasks are dealt to them one by one, and none is left when the work ends, however it ends.

They are programs of their own rather than forks or spawned copies of this process, so nothing here must be importable
or guarded, and no thread of a library is copied.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from trainer.errors import RunError
from trainer.tokenize.job import TaskProgress

_COMMAND = (sys.executable, "-P", "-m", "trainer.tokenize.worker")


def run_tasks(
    job_file: Path,
    tasks: Sequence[int],
    *,
    num_workers: int,
    lock: int,
    on_progress: Callable[[TaskProgress], None],
) -> None:
    """Do the tasks in worker processes.

    Args:
        lock: descriptor that workers keep open, so that the output stays locked until the last of them is gone.

    Raises:
        RunError: a worker failed or was killed; the others are ended.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // num_workers)
    # Each would encode with as many threads as there are cores.
    env = {"RAYON_NUM_THREADS": str(threads)} | os.environ
    workers = [
        subprocess.Popen(
            [*_COMMAND, str(job_file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, pass_fds=(lock,)
        )
        for _ in range(min(num_workers, len(tasks)))
    ]
    pending: SimpleQueue[int] = SimpleQueue()
    answers: SimpleQueue[dict[str, Any]] = SimpleQueue()
    for task in tasks:
        pending.put(task)
    feeders = [
        threading.Thread(target=_feed, args=(worker, pending, answers), name="tokenize worker", daemon=True)
        for worker in workers
    ]
    try:
        for feeder in feeders:
            feeder.start()
        remaining = len(tasks)
        while remaining:
            answer = answers.get()
            match answer:
                case {"progress": progress}:
                    on_progress(TaskProgress(**progress))
                case {"done": _}:
                    remaining -= 1
                case {"error": message}:
                    raise RunError(message)
                case {"bug": stack}:
                    raise RuntimeError(f"a worker process failed\n{stack}")
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()


def _feed(worker: subprocess.Popen[bytes], pending: "SimpleQueue[int]", answers: "SimpleQueue[dict[str, Any]]") -> None:
    """Give a worker one task after the other and pass its answers on, until no task is left or it fails."""
    assert worker.stdin is not None and worker.stdout is not None
    while True:
        try:
            task = pending.get_nowait()
        except Empty:
            return
        try:
            worker.stdin.write(f"{task}\n".encode())
            worker.stdin.flush()
        except OSError:
            pass  # It is gone already, and its standard output says so next.
        answer: dict[str, Any] = {}
        while "done" not in answer:
            line = worker.stdout.readline()
            if not line.endswith(b"\n"):
                answers.put({"error": _describe_end(worker, task)})
                return
            answer = json.loads(line)
            answers.put(answer)


def _describe_end(worker: subprocess.Popen[bytes], task: int) -> str:
    code = worker.wait()
    if code == -signal.SIGKILL:
        how = "was killed (SIGKILL), for want of memory perhaps"
    elif code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    else:
        how = f"ended with exit code {code}"
    return f"a worker process {how} during task {task}. The same command goes on from the finished tasks"
