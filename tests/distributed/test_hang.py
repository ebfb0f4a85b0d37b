"""A rank that stops moving, through the real command."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from trainer.heartbeat import read_beat
from trainer.run import rank_heartbeat, rank_log
from trainer.watchdog import Watchdog


def wait_for_step(run_dir: Path, step: int, process) -> None:
    """Until rank 1 has come so far."""
    end = time.monotonic() + 120
    while not ((beat := read_beat(run_dir / "logs" / "latest" / "rank_1.heartbeat")) and beat.step >= step):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "the run does not get on"
        time.sleep(0.01)


def rank_pid(process, rank: int) -> int:
    """Process id of a worker."""
    children = [path.read_text().split() for path in Path(f"/proc/{process.pid}/task").glob("*/children")]
    marks = {int(pid): Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pids in children for pid in pids}
    return next(pid for pid, mark in marks.items() if f"RANK={rank}".encode() in mark)


class Hook(BaseHTTPRequestHandler):
    """Keeps what is posted."""

    messages: ClassVar[list[dict]] = []

    def do_POST(self) -> None:
        self.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hook(monkeypatch) -> Iterator[list[dict]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        monkeypatch.setenv("ONELOOP_WEBHOOK_URL", f"http://127.0.0.1:{server.server_port}/")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Hook.messages
        server.shutdown()


def test_a_stopped_rank_is_named_and_ends_the_run(runner, hook):
    """Rank 1 of two is stopped: the run ends with exit code 1 and says which rank hangs, in which step and phase, and
    which collective the other one waits in; that one's stacks are in its log; no process is left; the webhook knows."""
    config = runner.config("hang", steps=100_000, interval=1_000_000)
    run_dir = runner.folder / "hang"
    options = [
        "--deployment.num-train-gpus",
        "2",
        "--deployment.timeout-seconds",
        "3",
        "--no-val",
        "--monitors.webhook",
    ]
    process = runner.popen("@", config, *options)
    try:
        wait_for_step(run_dir, 5, process)
        pids = [rank_pid(process, rank) for rank in (0, 1)]
        os.kill(pids[1], signal.SIGSTOP)
        stopped = time.monotonic()
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()  # its workers die with it
    assert process.returncode == 1 and time.monotonic() - stopped < 30
    logs = run_dir / "logs" / "attempt_0"
    beats = [read_beat(logs / f"rank_{rank}.heartbeat") for rank in (0, 1)]
    last = output.splitlines()[-1]
    assert last.startswith(
        f"no rank has moved for 3 s: rank 1 hangs ({beats[1]}, stopped by a signal); rank 0 waits in "
    )
    assert f" of all ranks) ({beats[0]}). Stacks of all threads are at the end of each rank's log in {logs}" in last
    assert "Traceback" not in output
    assert [(told["event"], told["attempt"]) for told in hook] == [("started", 0), ("failed", 0)]
    assert beats[0] is not None and (hook[1]["reason"], hook[1]["step"]) == (last, beats[0].step)
    stacks = (logs / "rank_0.log").read_text().rpartition("Current thread")[2]
    assert "run_micro_batches" in stacks or "trainer/train.py" in stacks
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert "time/step/max" not in records[1]  # known when the step is over
    check_stragglers(records[2:])


def check_stragglers(records: list[dict]) -> None:
    """What the steps before the hang say of single ranks."""
    for record in records:
        assert record["time/step/slowest_rank"] in (0, 1) and record["time/update/slowest_rank"] in (0, 1)
        assert record["time/step/max"] >= record["time/step/mean"] > record["time/update/mean"] > 0
        assert record["perf/peak_memory/max"] == record["perf/peak_memory"] >= record["perf/peak_memory/mean"] > 0


def test_stacks_and_collectives_of_ranks_that_all_answer(tmp_path):
    """Both are asked by a signal while one sleeps in Python and the other waits in gloo's code."""
    rank_heartbeat(tmp_path, 0, 0).parent.mkdir(parents=True)
    worker = Path(__file__).with_name("hanging_worker.py")
    processes = [subprocess.Popen([sys.executable, worker, tmp_path, str(rank)]) for rank in (0, 1)]
    try:
        end = time.monotonic() + 60
        while not all(
            (beat := read_beat(rank_heartbeat(tmp_path, 0, rank))) and beat.step == 3 for rank in (0, 1)
        ) and all(process.poll() is None for process in processes):
            assert time.monotonic() < end
            time.sleep(0.02)
        pids = {rank: process.pid for rank, process in enumerate(processes)}
        found = ""
        while "rank 0 waits" not in found and time.monotonic() < end:  # it may not have come to gloo's code yet
            found = Watchdog(tmp_path, 0, range(2), 10).examine(pids, lambda rank, signum: os.kill(pids[rank], signum))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert found.startswith(
        "rank 1 hangs (step 3, waiting for data); rank 0 waits in gloo:all_reduce (number 3 of all ranks) "
        "(step 3, optimizer). Stacks of all threads are at the end"
    )
    assert "in sleep_in_the_data" in rank_log(tmp_path, 0, 1).read_text()
    assert "in all_reduce" in rank_log(tmp_path, 0, 0).read_text()
