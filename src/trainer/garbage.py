"""Python's garbage collection, at the same steps on all ranks.

Left to itself Python collects when it has made so many objects, at another moment on every rank, and all others wait
for the one that pauses. Here nothing is collected but between two steps, while the device still works on the first.
What lives when training starts, modules and compiled code, is never looked at again.
"""

import gc


class GarbageCollection:
    """Collects every `interval` steps, from `start` to `close`; with None, Python does as it always does."""

    def __init__(self, interval: int | None) -> None:
        self._interval = interval
        self._in_first_step = True

    def start(self) -> None:
        """Take over, before the first step."""
        if self._interval is not None:
            gc.disable()
            _set_aside()

    def after_step(self, step: int) -> None:
        """Collect, if it is time. It takes no time to speak of: what was set aside is not looked at.

        Args:
            step: number of the step whose work was just given to the device, 1 for the first.
        """
        if self._interval is None:
            return
        if self._in_first_step:
            self._in_first_step = False
            _set_aside()  # what compilation left
        elif step % self._interval == 0:
            gc.collect()

    def close(self) -> None:
        """Give Python its own way back."""
        if self._interval is not None:
            gc.unfreeze()
            gc.enable()


def _set_aside() -> None:
    gc.collect()
    gc.freeze()
