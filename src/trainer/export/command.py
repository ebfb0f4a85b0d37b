"""`export-hf`: a checkpoint as a Hugging Face folder. See docs/checkpoints.md."""

import sys
from typing import TYPE_CHECKING

from trainer.command import run_command, say

if TYPE_CHECKING:
    from configs.export import ExportConfig


def main() -> None:
    """Entry point of the command."""
    sys.exit(run_export(sys.argv[1:]))


def run_export(argv: list[str]) -> int:
    """Export as the command line says.

    Returns:
        exit code: 0 done, 1 failed, 2 the command line or what it points to is wrong.
    """
    return run_command("export-hf", _config_class, _start, argv)


def _config_class() -> type["ExportConfig"]:
    from configs.export import ExportConfig

    return ExportConfig


def _start(config: "ExportConfig") -> int:
    # Imports torch, which takes a second.
    from trainer.export.work import export

    export(config, say)
    return 0
