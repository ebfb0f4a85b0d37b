"""Every command that the documents show in a block works, on the quickstart made small.

`sft` runs once; its other commands are resolved and checked as `--dry-run` does, and so is the config of `eval-worker`.
All other tools and scripts run.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.cli import resolve
from configs.eval_worker import EvalWorkerConfig
from trainer.export.command import run_export
from trainer.inspect.command import run_inspect
from trainer.reports.compare import run_compare
from trainer.reports.plot import run_plot
from trainer.sft import run_sft
from trainer.tokenize.command import run_tokenize

ROOT = Path(__file__).parents[3]
PAGES = sorted(path.relative_to(ROOT) for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```[^\n`]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Topics of a user; the other pages are about the code.
TOPICS = {
    "README",
    "launch",
    "config",
    "data",
    "chats",
    "models",
    "validation",
    "checkpoints",
    "metrics",
    "reports",
    "extending",
}
# Their commands stand beside an answer, or beside code of the page, which tests of their own hold them to.
ELSEWHERE = {"docs/config.md", "docs/extending.md"}
# A training of its own, with its parts: tests/unit/quickstart/test_chat_quickstart.py.
CHAT_QUICKSTART = {"examples/quickstart/chat.toml", "examples/quickstart/score.py"}

SMALLER = {
    "max_steps = 400": "max_steps = 12",
    "hidden_size = 192": "hidden_size = 24",
    "intermediate_size = 512": "intermediate_size = 32",
    "num_hidden_layers = 6": "num_hidden_layers = 1",
    "seq_lens = [256, 512]": "seq_lens = [64, 128]",
    "interval = 100": "interval = 6",
    "warmup_steps = 30": "warmup_steps = 1",
    "decay_steps = 200": "decay_steps = 2",
    'paths = ["examples/quickstart/train"]\nseq_len = 256': 'paths = ["examples/quickstart/train"]\nseq_len = 32',
}
TOOLS: dict[str, Callable[[list[str]], int]] = {
    "compare-runs": run_compare,
    "export-hf": run_export,
    "inspect-data": run_inspect,
    "plot-runs": run_plot,
    "tokenize": run_tokenize,
}


def commands(page: Path) -> list[list[str]]:
    """The words of each `uv run ...` line in the blocks of a page, without `uv run`."""
    lines = [line for block in BLOCK.findall((ROOT / page).read_text()) for line in block.splitlines()]
    found = [line.removeprefix("$ ") for line in lines]
    return [shlex.split(line, comments=True)[2:] for line in found if line.startswith("uv run ")]


ALL = [
    (page, words)
    for page in PAGES
    if str(page) not in ELSEWHERE
    for words in commands(page)
    if not CHAT_QUICKSTART & set(words)
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the repository after the quickstart: its examples, smaller, and runs of it."""
    world = tmp_path_factory.mktemp("world")
    shutil.copytree(ROOT / "examples", world / "examples")
    config = world / "examples" / "quickstart" / "pretrain.toml"
    text = config.read_text()
    for old, new in SMALLER.items():
        assert old in text, f"{config.name} has changed: {old!r} is not there"
        text = text.replace(old, new)
    config.write_text(text)
    (world / "resume.toml").write_text("[resume]\n")
    (world / "my_text").mkdir()
    (world / "my_text" / "a.txt").write_text("One document.\n")
    here = Path.cwd()
    os.chdir(world)
    try:
        assert run_sft(["@", "examples/quickstart/pretrain.toml"]) == 0
        assert run_export(["outputs/quickstart", "--output-dir", "my_model"]) == 0
        subprocess.run([sys.executable, "examples/validation/make_sets.py"], check=True, timeout=120)
    finally:
        os.chdir(here)
    for name in ("a", "b"):
        shutil.copytree(world / "outputs" / "quickstart", world / "outputs" / name)
    return world


def test_every_topic_has_commands() -> None:
    known = ("sft", "python", "eval-worker", *TOOLS)
    pages = {page.stem for page in PAGES if any(words[0] in known for words in commands(page))}
    assert sorted(TOPICS - pages) == []


@pytest.mark.parametrize(("page", "words"), ALL, ids=[f"{page.stem}: {shlex.join(words)[:60]}" for page, words in ALL])
def test_command(world: Path, page: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    name, *arguments = words
    if ">" in arguments:
        arguments = arguments[: arguments.index(">")]
    if name == "sft":
        extra = [] if "--dry-run" in arguments else ["--dry-run"]
        if not any("resume" in argument for argument in arguments):
            extra += ["--output-dir", "elsewhere"]  # the run of the quickstart is there already
        assert run_sft([*arguments, *extra]) == 0
    elif name == "python":
        subprocess.run([sys.executable, *arguments], check=True, timeout=120)
    elif name == "eval-worker":
        assert resolve(arguments, EvalWorkerConfig, name).config.run_dir == Path("outputs/quickstart")
    elif name in TOOLS:
        assert TOOLS[name](arguments) == 0
    else:
        assert name in ("pytest", "--group"), f"{page} shows a command of no tool"
        tests = [word for word in arguments if word.startswith("tests/")]
        assert [path for path in tests if not (ROOT / path).exists()] == []
