"""A worker process of `tokenize`: numbers of tasks come in on standard input, JSON lines of progress go out.

It ends when its standard input does, in the middle of a task too: with the command, however that ended.
"""

import json
import os
import signal
import sys
import threading
import traceback
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from trainer.errors import RunError
from trainer.tokenize.job import Job, run_task


def main() -> None:
    """Do the tasks that are asked for until there are none."""
    # Ctrl-C goes to the whole group; the command ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print must not get among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    job = Job.read(Path(sys.argv[1]))
    asked: SimpleQueue[int] = SimpleQueue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    while True:
        task = asked.get()
        try:
            run_task(job, job.tasks[task], lambda progress: answer(progress=asdict(progress)))
        except RunError as error:
            answer(error=str(error))
        except Exception:
            answer(bug=traceback.format_exc())
        else:
            answer(done=task)


def _listen(asked: "SimpleQueue[int]") -> None:
    for line in sys.stdin:
        asked.put(int(line))
    os._exit(0)


if __name__ == "__main__":
    main()
