"""A worker process of `tokenise_pool`: the work and then chunks come in on standard input, tokens go out.

It ends when its standard input does, in the middle of a chunk too: with the process that started it, however that
ended.
"""

import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import asdict
from queue import SimpleQueue

from configs.errors import ConfigError
from trainer.data.chat.cache.pool import Answer
from trainer.data.chat.cache.tokenise import Tokeniser
from trainer.errors import RunError


def main() -> None:
    """Tokenise the chunks that are asked for until there are none."""
    # Ctrl-C goes to the whole group; whoever started this process ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print must not get among the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        work = pickle.load(sys.stdin.buffer)
    except EOFError:
        return
    asked: SimpleQueue[tuple[int, int]] = SimpleQueue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    tokeniser: Tokeniser | None = None
    while True:
        start, stop = asked.get()
        try:
            tokeniser = tokeniser or Tokeniser(work)
            answer: Answer = ("chunk", tokeniser.tokenise(start, stop))
        except ConfigError as error:
            answer = ("faults", [asdict(fault) for fault in error.faults])
        except RunError as error:
            answer = ("error", str(error))
        except Exception:
            answer = ("bug", traceback.format_exc())
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


def _listen(asked: "SimpleQueue[tuple[int, int]]") -> None:
    try:
        while True:
            asked.put(pickle.load(sys.stdin.buffer))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
