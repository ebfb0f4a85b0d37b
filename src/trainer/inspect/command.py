"""`inspect-data`: shows rows as the model will see them, and counts. Neither model nor GPU has a part in it."""

import json
import sys
from typing import TYPE_CHECKING

from trainer.command import run_command, warn

if TYPE_CHECKING:
    from configs.inspect import InspectConfig


def main() -> None:
    """Entry point of the command."""
    sys.exit(run_inspect(sys.argv[1:]))


def run_inspect(argv: list[str]) -> int:
    """Show what the command line asks for.

    Returns:
        exit code: 0 done, 1 a row cannot be read, 2 the config or the data it points to is at fault, 141 the reader of
        the output went away.
    """
    return run_command("inspect-data", _config_class, _start, argv, tell=warn)


def _config_class() -> type["InspectConfig"]:
    from configs.inspect import InspectConfig

    return InspectConfig


def _start(config: "InspectConfig") -> int:
    # Everything here imports torch or transformers.
    from trainer.data.row import untracked
    from trainer.inspect.findings import gather
    from trainer.inspect.render import Style, render_selection
    from trainer.inspect.report import document, render_counts, render_dropped, render_plan
    from trainer.inspect.token_text import TokenText
    from trainer.progress import ProgressBars, has_colours

    with ProgressBars(warn) as bars:  # a bar on stdout would be no JSON
        findings = gather(config, untracked if config.json else bars.track)
    texts = TokenText(findings.tokenizer)
    if config.json:
        print(json.dumps(document(findings, texts)))
        return 0
    _print(f"data: {findings.source.description}")
    if findings.template is not None:
        _print(f"template: {findings.template}")
    if findings.plan is not None:
        _print(render_plan(findings.plan))
    style = Style(colours=has_colours(sys.stdout))
    for text in render_selection(findings.selection, texts, style, table=config.table):
        _print(text)
    if findings.counts is not None:
        _print("")
        for text in render_counts(findings.counts):
            _print(text)
    for text in render_dropped(findings.dropped):
        _print(text)
    return 0


def _print(text: str) -> None:
    """To stdout, whatever letters its encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
