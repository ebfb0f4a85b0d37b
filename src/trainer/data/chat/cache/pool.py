"""All rows of a part to tokens: here, or in worker processes where there is much to do. No worker is left when the
work ends, however it ends.

Workers are programs of their own rather than forks or spawned copies of this process, as those of `trainer.tokenize`:
nothing here must be importable or guarded, and no thread of a library is copied. Chunks are handed on in order, so
what comes of them does not depend on how many workers there are, nor does the fault that is told.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from configs.errors import ConfigError, Fault
from trainer.data.chat.cache.tokenise import Chunk, Tokeniser, Work
from trainer.errors import RunError

_COMMAND = (sys.executable, "-P", "-m", "trainer.data.chat.cache.worker")

_ROWS = 128
"""Of a chunk."""

_ALONE_SECONDS = 2.0
"""Work that takes less is done here. The start of workers takes about as long."""

_AHEAD = 4
"""Chunks per worker that may be done before their turn: what they take in memory has a bound."""

Answer = Chunk | list[Fault] | str
"""Of a worker; the text is the stack of a bug."""


def tokenise_part(tokeniser: Tokeniser, *, workers: int) -> Generator[Chunk]:
    """All of a part in chunks, in the order of its rows.

    Args:
        workers: processes that may be started.

    Raises:
        ConfigError: about the first row that nobody should train over, whoever finds it.
        RunError: a worker was killed.
    """
    num_rows = tokeniser.work.part.num_rows
    chunks = [(start, min(start + _ROWS, num_rows)) for start in range(0, num_rows, _ROWS)]
    end = time.monotonic() + _ALONE_SECONDS
    for number, (start, stop) in enumerate(chunks):
        remaining = chunks[number:]
        if workers > 1 and len(remaining) > 1 and time.monotonic() >= end:
            with closing(_tokenise_in_workers(tokeniser.work, remaining, workers)) as results:
                yield from results
            return
        yield tokeniser.tokenise(start, stop)


def default_workers() -> int:
    """One process per core that this one may use."""
    return len(os.sched_getaffinity(0))


def _tokenise_in_workers(work: Work, chunks: Sequence[tuple[int, int]], workers: int) -> Generator[Chunk]:
    """Tokenise chunks, (start, stop) in rows, and give them in their order."""
    workers = min(workers, len(chunks))
    threads = max(1, default_workers() // workers)
    # Each would encode with as many threads as there are cores.
    env = os.environ | {
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        processes = dict(_start(stack, env) for _ in range(workers))
        for connection in processes:
            _tell(connection, work)
        idle, busy = list(processes), dict[Connection, int]()
        answers: dict[int, Answer] = {}
        asked = 0
        for number in range(len(chunks)):
            while True:
                while idle and asked < min(len(chunks), number + _AHEAD * workers):
                    connection = idle.pop()
                    _tell(connection, chunks[asked])
                    busy[connection] = asked
                    asked += 1
                # Those who are done get more to do before the next chunk is handed on.
                ready = wait(list(busy), timeout=0 if number in answers else None)
                for connection in ready:
                    assert isinstance(connection, Connection)
                    answers[busy.pop(connection)] = _hear(connection, processes[connection])
                    idle.append(connection)
                if number in answers and not ready:
                    break
            yield _open(answers.pop(number))


def _start(stack: ExitStack, env: dict[str, str]) -> tuple[Connection, subprocess.Popen[bytes]]:
    """A worker, which is ended with the stack, and the way to it."""
    ours, theirs = Pipe()
    stack.enter_context(ours)
    with theirs:
        process = subprocess.Popen(
            (*_COMMAND, str(theirs.fileno())),
            stdin=subprocess.PIPE,
            stdout=2,  # what libraries print is none of our output
            env=env,
            pass_fds=(theirs.fileno(),),
        )
    stack.enter_context(process)
    stack.callback(process.kill)
    return ours, process


def _tell(connection: Connection, what: object) -> None:
    # A process that is gone says so by the end of what it sends.
    with suppress(OSError):
        connection.send(what)


def _hear(connection: Connection, process: subprocess.Popen[bytes]) -> Answer:
    try:
        return connection.recv()
    except (EOFError, OSError):
        raise RunError(_describe_end(process)) from None


def _open(answer: Answer) -> Chunk:
    match answer:
        case Chunk():
            return answer
        case list():
            raise ConfigError(answer)
        case _:
            raise RuntimeError(f"a worker process failed\n{answer}")


def _describe_end(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    if code == -signal.SIGKILL:
        how = "was killed (SIGKILL), for want of memory perhaps; data.cache_workers sets how many there are"
    elif code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    else:
        how = f"ended with exit code {code}"
    return f"a process that tokenises {how}"
