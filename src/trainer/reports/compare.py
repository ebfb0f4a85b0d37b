"""`compare-runs`: the first step at which two runs differ, and in what. Exit code 0 equal, 1 different, 2 no answer."""

import sys
from typing import TYPE_CHECKING

from trainer.command import run_command

if TYPE_CHECKING:
    from configs.reports import CompareConfig


def main() -> None:
    """Entry point of the command."""
    sys.exit(run_compare(sys.argv[1:]))


def run_compare(argv: list[str]) -> int:
    """Compare two runs as the command line says.

    Returns:
        exit code: 0 equal in all that was compared, 1 different, 2 nothing could be compared.
    """
    return run_command("compare-runs", _config_class, _start, argv)


def _config_class() -> type["CompareConfig"]:
    from configs.reports import CompareConfig

    return CompareConfig


def _start(config: "CompareConfig") -> int:
    from configs.errors import ConfigError
    from trainer.reports.comparison_text import as_json, as_text
    from trainer.reports.differences import compare, read_run

    a, b = (read_run(path) for path in config.runs)
    for run in (a, b):
        if run.metrics.last_step is None:
            raise ConfigError.one("runs", f"{run.metrics.path} has no whole record yet: nothing to compare")
    comparison = compare(a, b, rtol=config.rtol, with_config=config.config)
    if not comparison.num_compared and not comparison.has_held_out:
        raise ConfigError.one("runs", f"{a.path} and {b.path} have no step of a metric in common: nothing to compare")
    if config.json:
        print(as_json(comparison))
    else:
        from trainer.progress import has_colours

        print(as_text(comparison, rtol=config.rtol, colours=has_colours(sys.stdout)))
    return 0 if comparison.equal else 1
