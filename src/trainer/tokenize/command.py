"""`tokenize`: text to token shards. Finds the sources, then leaves the work to `trainer.tokenize.work`."""

import sys
from typing import TYPE_CHECKING

from trainer.command import run_command, say

if TYPE_CHECKING:
    from configs.tokenize import TokenizeConfig


def main() -> None:
    """Entry point of the command."""
    sys.exit(run_tokenize(sys.argv[1:]))


def run_tokenize(argv: list[str]) -> int:
    """Tokenise as the command line says.

    Returns:
        exit code: 0 done, 1 failed, 2 the config cannot run, 130 after Ctrl-C.
    """
    return run_command("tokenize", _config_class, _start, argv)


def _config_class() -> type["TokenizeConfig"]:
    from configs.tokenize import TokenizeConfig

    return TokenizeConfig


def _start(config: "TokenizeConfig") -> int:
    from trainer.tokenize.sources import find_sources

    files, hub = find_sources(config)
    # Imports datatrove, which takes seconds.
    from trainer.tokenize.work import tokenize

    tokenize(config, files, hub, say)
    return 0
