"""The commands in the documents: those with an answer give that answer, the others resolve."""

import re
import shlex
from pathlib import Path

import pytest

from configs.cli import render_error, resolve
from configs.errors import ConfigError

ROOT = Path(__file__).parents[3]
BLOCKS = re.compile(r"^```[^\n`]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _answers() -> list[tuple[str, str]]:
    """The arguments of each `$ uv run sft` in docs/config.md, and what is printed below."""
    text = (ROOT / "docs" / "config.md").read_text()
    parts = [part for block in BLOCKS.findall(text) for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    pairs = [part.partition("\n") for part in parts if part.startswith("uv run sft ")]
    return [(command.removeprefix("uv run sft "), answer.strip()) for command, _, answer in pairs]


def _commands() -> list[str]:
    """Commands on the quickstart's config that are shown to work."""
    texts = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    blocks = [block for text in texts for block in BLOCKS.findall(text)]
    lines = [line for block in blocks for line in block.splitlines()]
    begin = "uv run sft @ examples/quickstart/pretrain.toml"
    return sorted(
        {line.partition(" #")[0].removeprefix("uv run sft ").rstrip() for line in lines if line.startswith(begin)}
    )


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that the documents' commands run in."""
    typos = re.search(r"^\$ cat typos.toml\n(.*?)^\$ ", (ROOT / "docs" / "config.md").read_text(), re.M | re.DOTALL)
    assert typos is not None
    (tmp_path / "typos.toml").write_text(typos[1])
    (tmp_path / "broken.toml").write_text("\n\nmax_steps = \n")
    (tmp_path / "resume.toml").write_text("[resume]\n")
    for name in ("quickstart", "a", "validation"):
        (tmp_path / "outputs" / name).mkdir(parents=True)
    for name in ("names", "order", "next_line", "source"):
        (tmp_path / "outputs" / "validation" / f"{name}.jsonl").touch()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)


def test_documents_have_commands() -> None:
    assert len(_answers()) >= 5
    assert len(_commands()) >= 2


@pytest.mark.parametrize("command, answer", _answers())
def test_answer(files: None, command: str, answer: str) -> None:
    try:
        resolved = resolve(shlex.split(command))
    except ConfigError as error:
        assert render_error(error) == answer
    else:
        assert "\n".join(resolved.notes) == answer


@pytest.mark.parametrize("command", _commands())
def test_command(files: None, command: str) -> None:
    resolve(shlex.split(command))
