"""`--clean` with links that lead out of the run directory: nothing outside is deleted or written."""

from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.sft import SFTConfig
from trainer.errors import RunError
from trainer.run_dir import check_run_dir, open_run_dir


def make(output_dir: Path, **values: Any) -> SFTConfig:
    base = {"data": {"type": "fake"}, "output_dir": output_dir, "run": {"name": "one"}}
    return SFTConfig.model_validate(base | values)


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    """Two runs, and things beside them."""
    folder = tmp_path / "home" / "outputs"
    for name in ("one", "two"):
        open_run_dir(make(folder, run={"name": name}), print).close()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    (tmp_path / "home" / "configs").mkdir()
    (tmp_path / "home" / "configs" / "sft.json").write_text("{}")
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("target", [".", "..", "two", "../../home", "../../home/outputs/two", "/"])
def test_a_run_directory_that_is_a_link(output_dir: Path, target: str) -> None:
    """Even to another run of ours below the same output_dir."""
    (output_dir / "three").symlink_to(target)
    before = contents(output_dir.parent)
    config = make(output_dir, run={"name": "three"}, clean=True)
    for refuse in (check_run_dir, lambda config: open_run_dir(config, print)):
        with pytest.raises(ConfigError, match=r"three (is a link to|holds no configs|is not a folder|is in use)"):
            refuse(config)
    after = contents(output_dir.parent)
    assert {path: content for path, content in after.items() if path not in before and ".lock" not in path} == {}
    assert before.keys() <= after.keys()


@pytest.mark.parametrize("name", ["checkpoints", "configs", "logs", "metrics.jsonl", "deep/er/x"])
def test_links_inside_a_run_directory(output_dir: Path, tmp_path: Path, name: str) -> None:
    """The link goes, what it leads to stays as it was."""
    run_dir, outside = output_dir / "one", tmp_path / "outside"
    outside.mkdir()
    (outside / "sft.json").write_text("{}")
    link = run_dir / name
    if link.is_dir():
        link.rename(tmp_path / "moved")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside / "sft.json" if name == "metrics.jsonl" else outside)
    before = contents(outside)
    open_run_dir(make(output_dir, clean=True), print).close()
    assert contents(outside) == before
    assert not any(path.is_symlink() for path in run_dir.iterdir())
    assert sorted(path.name for path in run_dir.iterdir()) == [".lock", "configs", "logs"]


def test_a_lock_that_is_a_link_is_not_followed(output_dir: Path, tmp_path: Path) -> None:
    """It is emptied when the lock is taken."""
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    (output_dir / "one" / ".lock").unlink()
    (output_dir / "one" / ".lock").symlink_to(precious)
    with pytest.raises(RunError, match=r"\.lock: Too many levels of symbolic links"):
        open_run_dir(make(output_dir, clean=True), print)
    assert precious.read_text() == "years of work"
