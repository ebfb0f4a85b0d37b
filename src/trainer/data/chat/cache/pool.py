"""All rows of a part to tokens: here, or in worker processes where there is much to do. No worker is left when the
work ends, however it ends.

Workers are programs of their own rather than forks or spawned copies of this process, as those of `trainer.tokenize`:
nothing here must be importable or guarded, and no thread of a library is copied. Chunks are handed on in order, so
what comes of them does not depend on how many workers there are, nor does the fault that is told.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from queue import SimpleQueue
from typing import Any

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

Answer = tuple[str, Any]
"""("chunk", Chunk), ("faults", list of Fault), ("error", message) or ("bug", stack)."""


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


def _tokenise_in_workers(work: Work, chunks: Sequence[tuple[int, int]], workers: int) -> Generator[Chunk]:
    """Tokenise chunks, (start, stop) in rows, and give them in their order."""
    workers = min(workers, len(chunks))
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    # Each would encode with as many threads as there are cores.
    env = os.environ | {
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
        "OMP_NUM_THREADS": "1",
    }
    deal = _Deal(chunks, ahead=_AHEAD * workers)
    told = pickle.dumps(work)
    processes: list[subprocess.Popen[bytes]] = []
    feeders: list[threading.Thread] = []
    try:
        for _ in range(workers):
            process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
            processes.append(process)
            feeder = threading.Thread(target=_feed, args=(process, told, deal), name="tokenising worker", daemon=True)
            feeders.append(feeder)
            feeder.start()
        yield from deal.in_order()
    finally:
        deal.stop()
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for feeder in feeders:
            feeder.join()
        for process in processes:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # what it did not read any more
                    pipe.close()


class _Deal:
    """Chunks on their way to workers, and their answers on the way back."""

    def __init__(self, chunks: Sequence[tuple[int, int]], *, ahead: int) -> None:
        self._chunks = chunks
        self._next = 0
        self._stopped = False
        self._lock = threading.Lock()
        self._room = threading.Semaphore(ahead)
        self._answers: SimpleQueue[tuple[int, Answer]] = SimpleQueue()

    def take(self) -> int | None:
        """The number of the next chunk to do, once there is room for it; None when there is no more."""
        self._room.acquire()
        with self._lock:
            if self._stopped or self._next == len(self._chunks):
                self._room.release()  # for the next worker that asks
                return None
            self._next += 1
            return self._next - 1

    def rows(self, number: int) -> tuple[int, int]:
        return self._chunks[number]

    def answer(self, number: int, answer: Answer) -> None:
        self._answers.put((number, answer))

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
        self._room.release()

    def in_order(self) -> Iterator[Chunk]:
        early: dict[int, Answer] = {}
        for number in range(len(self._chunks)):
            while number not in early:
                other, answer = self._answers.get()
                early[other] = answer
            yield _open(early.pop(number))
            self._room.release()


def _open(answer: Answer) -> Chunk:
    match answer:
        case ("chunk", chunk):
            return chunk
        case ("faults", faults):
            raise ConfigError([Fault(**fault) for fault in faults])
        case ("error", message):
            raise RunError(message)
        case (_, stack):
            raise RuntimeError(f"a worker process failed\n{stack}")


def _feed(process: subprocess.Popen[bytes], told: bytes, deal: _Deal) -> None:
    """Give a worker one chunk after the other and pass its answers on, until there is no more or it fails."""
    assert process.stdin is not None and process.stdout is not None
    _tell(process, told)
    while (number := deal.take()) is not None:
        _tell(process, pickle.dumps(deal.rows(number)))
        try:
            answer = pickle.load(process.stdout)
        except (EOFError, pickle.UnpicklingError, OSError):
            deal.answer(number, ("error", _describe_end(process)))
            return
        deal.answer(number, answer)


def _tell(process: subprocess.Popen[bytes], told: bytes) -> None:
    assert process.stdin is not None
    # A process that is gone says so by the end of its standard output.
    with suppress(OSError):
        process.stdin.write(told)
        process.stdin.flush()


def _describe_end(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    if code == -signal.SIGKILL:
        how = "was killed (SIGKILL), for want of memory perhaps; data.cache_workers sets how many there are"
    elif code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    else:
        how = f"ended with exit code {code}"
    return f"a process that tokenises {how}"


def default_workers() -> int:
    """One process per core that this one may use."""
    return len(os.sched_getaffinity(0))
