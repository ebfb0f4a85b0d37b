"""What an eval-worker makes of a time in which no snapshot comes."""

import logging
import time
from pathlib import Path

from trainer.attempts import is_in_use
from trainer.errors import RunError
from trainer.snapshots import queue

log = logging.getLogger(__name__)

_LOOK_SECONDS = 60.0
"""Between two looks whether the training lives. Each locks its folder for a moment, in which it cannot start."""


class Silence:
    """Since the last result. It begins when the worker does."""

    def __init__(self, run_dir: Path, max_minutes: float | None) -> None:
        """
        Args:
            max_minutes: after so long the worker ends; None: never.
        """
        self._run_dir = run_dir
        self._max_minutes = max_minutes
        self.end()

    def end(self) -> None:
        """A result has come."""
        self._since = time.monotonic()
        self._next_look = self._since
        self._said = False

    def heed(self) -> None:
        """Nothing waits, and the run is not over: say when no training is there to write more.

        Raises:
            RunError: it lasts too long.
        """
        now = time.monotonic()
        if self._max_minutes is not None and now - self._since > 60 * self._max_minutes:
            raise RunError(
                f"no snapshot has come for max_idle_minutes = {self._max_minutes:g}, and the training in "
                f"{self._run_dir} has not written its last one"
            )
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        is_dead = is_in_use(self._run_dir) is False
        # It may have ended between two looks, and left its last one.
        if is_dead and not self._said and not queue.is_over(self._run_dir) and not queue.waiting(self._run_dir):
            text = "no training runs in %s, and its last snapshot has not come: waiting until it is resumed"
            log.warning(text, self._run_dir)
        self._said = is_dead
