"""A worker process of `pool`: the work and then chunks come in over a connection, tokens go out.

It ends with its standard input, in the middle of a chunk too: with the process that started it, however that ended.
"""

import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from configs.errors import ConfigError
from trainer.data.chat.cache.pool import Answer
from trainer.data.chat.cache.tokenise import Tokeniser


def main() -> None:
    """Tokenise the chunks that are asked for until this process is ended."""
    # Ctrl-C goes to the whole group; whoever started this process ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_input, daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    with _ending_with_parent():
        told = connection.recv_bytes()
    work = pickle.loads(told)
    tokeniser: Tokeniser | None = None
    while True:
        with _ending_with_parent():
            start, stop = connection.recv()
        try:
            tokeniser = tokeniser or Tokeniser(work)
            answer: Answer = tokeniser.tokenise(start, stop)
        except ConfigError as error:
            answer = error.faults
        except Exception:
            answer = traceback.format_exc()
        with _ending_with_parent():
            connection.send(answer)


@contextmanager
def _ending_with_parent() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        os._exit(0)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
