"""Starts agents of nodes for test_nodes.py: imports torch once and forks, since an agent of its own takes seconds.

Reads a line of JSON per agent, {"argv", "env", "log", "command", "lost_seconds"}, and answers with its process id;
says "<pid> <exit code>" when one ends, negative for a signal.
"""

import json
import os
import select
import sys
from contextlib import suppress

import torch.distributed.elastic.agent.server.local_elastic_agent  # noqa: F401 (so that agents have it)

import trainer.elastic
import trainer.launch  # noqa: F401
from trainer import watchdog
from trainer.node import run_node
from trainer.peers import nodes


def start(order: dict) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= order["env"]
    watchdog._ANSWER_SECONDS = 1.0
    nodes.LOST_SECONDS = order["lost_seconds"]
    code = 70
    try:
        code = run_node(order["argv"], os.environ, order["command"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def reap() -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            print(pid, os.waitstatus_to_exitcode(status), flush=True)


print("ready", flush=True)
while True:
    ready, _, _ = select.select([0], [], [], 0.02)
    if ready:
        line = sys.stdin.readline()
        if not line:
            break
        print(start(json.loads(line)), flush=True)
    reap()
