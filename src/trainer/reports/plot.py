"""`plot-runs`: the curves of runs as one HTML page, once or for as long as the runs go on."""

import sys
import time
from typing import TYPE_CHECKING

from trainer.command import run_command, say

if TYPE_CHECKING:
    from configs.reports import PlotConfig


def main() -> None:
    """Entry point of the command."""
    sys.exit(run_plot(sys.argv[1:]))


def run_plot(argv: list[str]) -> int:
    """Write the page as the command line says.

    Returns:
        exit code: 0 written (also when watching was ended by Ctrl-C), 1 the page cannot be written, 2 a fault of the
        config or of a run's files.
    """
    return run_command("plot-runs", _config_class, _start, argv)


def _config_class() -> type["PlotConfig"]:
    from configs.reports import PlotConfig

    return PlotConfig


def _start(config: "PlotConfig") -> int:
    from configs.errors import ConfigError
    from trainer.reports.page import render_page, write_page
    from trainer.reports.runs import FollowedRuns

    followed = FollowedRuns(config.runs)

    def write(*, watch: bool) -> bool:
        """Write the page of this moment; gives whether it will be written again."""
        runs = followed.look()
        goes_on = watch and any(run.goes_on for run in runs)
        if not goes_on and all(run.metrics.last_step is None for run in runs):
            files = ", ".join(str(run.metrics.path) for run in runs)
            raise ConfigError.one("runs", f"there is no whole record yet in {files}: nothing to plot")
        write_page(config.output, render_page(runs, refresh=config.interval if goes_on else None))
        return goes_on

    try:
        goes_on = write(watch=config.watch)
        say(f"page: {config.output}")
        if goes_on:
            say(f"written every {config.interval:g} s while a run goes on; Ctrl-C ends that")
        try:
            while goes_on:
                time.sleep(config.interval)
                goes_on = write(watch=True)
        except KeyboardInterrupt:
            # Without a last page a browser would keep on loading one that nobody renews.
            write(watch=False)
    finally:
        followed.close()
    return 0
