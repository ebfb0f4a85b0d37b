"""One line a step for people, and how far the work is: bars on a terminal, a line now and then elsewhere."""

import logging
import sys
from collections.abc import Callable, Mapping

from trainer.progress import ProgressBar, WorkProgress, is_terminal
from trainer.text import with_unit

logger = logging.getLogger(__name__)

_COLUMNS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("loss/mean", "loss {:.4f}".format),
    ("optim/lr", "lr {:.2e}".format),
    ("optim/grad_norm", "grad norm {:.3f}".format),
    ("perf/throughput", lambda value: f"{with_unit(value)} tok/s"),
    ("perf/mfu", "mfu {:.1f}%".format),
    ("perf/peak_memory", "mem {:.1f} GiB".format),
    ("progress/epoch", "epoch {:.3f}".format),
)
"""What a step's line shows, in this order."""


class ConsoleMonitor:
    """Lines go through logging, so that they reach the rank's log file too; `trainer.progress.ConsoleHandler` prints
    them above the bar."""

    def __init__(self, *, interval: int, start_step: int, total_steps: int | None, description: str = "steps") -> None:
        """
        Args:
            interval: print the line of every interval-th step, and of the last.
            start_step: steps done before this start.
            total_steps: steps of the whole run; None where nobody counts up to them.
            description: what the bar counts.
        """
        self._interval = interval
        self._total = total_steps
        self._bar = ProgressBar(description=description, total=total_steps, completed=start_step)
        self._part: WorkProgress | None = None

    def log(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        self._bar.update(step)
        if "loss/mean" in metrics and (step % self._interval == 0 or step == self._total):
            logger.info(format_step(step, self._total, metrics))
        for line in format_validation(step, self._total, metrics):
            logger.info(line, extra={"colour": "green"})

    def rewind(self, step: int) -> None:
        self._bar.update(step)

    def show_part(self, description: str, completed: int, total: int) -> None:
        if is_terminal(sys.stdout):
            self._bar.update_part(description, completed, total)
            return
        if self._part is None:
            self._part = WorkProgress(description=description, total=total, unit="", say=logger.info, done=completed)
        self._part.update(completed)
        if completed == total:
            self._part = None

    def close(self) -> None:
        self._bar.close()


def format_step(step: int, total: int | None, metrics: Mapping[str, float | int | str]) -> str:
    """The line of a training step. What was not measured is left out.

    Example:
        step  120/2000 | loss 3.2145 | lr 3.00e-04 | grad norm 0.812 | 51.2k tok/s | mem 12.3 GiB | epoch 0.012
    """
    shown = [form(float(metrics[name])) for name, form in _COLUMNS if name in metrics]
    return " | ".join([_step_of(step, total), *shown])


def format_validation(step: int, total: int | None, metrics: Mapping[str, float | int | str]) -> list[str]:
    """A line for each held-out set and window length: `val/<set>/<metric>@<length>`, or `val/<metric>` for chats.

    Example:
        step  100/2000 | val stdlib @2k | loss 2.9100 | perplexity 18.3568 | bpb 1.2345
    """
    rounds: dict[str, list[str]] = {}
    for name, value in metrics.items():
        if not name.startswith("val/") or isinstance(value, str):
            continue
        held_out, _, metric = name.removeprefix("val/").rpartition("/")
        metric, at, length = metric.partition("@")
        heading = " ".join(filter(None, ["val", held_out, at + length]))
        rounds.setdefault(heading, []).append(f"{metric} {value:.4f}")
    return [" | ".join([_step_of(step, total), heading, *values]) for heading, values in rounds.items()]


def _step_of(step: int, total: int | None) -> str:
    if total is None:
        return f"step {step}"
    return f"step {step:>{len(str(total))}}/{total}"
