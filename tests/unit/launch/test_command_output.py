"""A command whose output has nowhere to go: `| head`, a full disk, a closed stdout. No traceback."""

import os
import sys
from pathlib import Path
from typing import TextIO

import pytest

from configs.reports import PlotConfig
from trainer.command import run_command, say


def command(tmp_path: Path, text: str = "a result") -> int:
    (tmp_path / "configs").mkdir(exist_ok=True)
    (tmp_path / "configs" / "sft.json").write_text("{}")

    def start(config: PlotConfig) -> int:
        print(text)
        say("written")
        return 0

    return run_command("plot-runs", lambda: PlotConfig, start, [str(tmp_path)])


def unread_pipe(*, buffered: bool) -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return wrapped(writer, buffered=buffered)


def wrapped(handle: int, *, buffered: bool) -> TextIO:
    """Buffered, or as with PYTHONUNBUFFERED."""
    file = os.fdopen(handle, "w")
    file.reconfigure(write_through=not buffered)  # type: ignore[attr-defined]
    return file


@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_that_went_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffered: bool) -> None:
    with unread_pipe(buffered=buffered) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert command(tmp_path) == 141


@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], buffered: bool
) -> None:
    with wrapped(os.open("/dev/full", os.O_WRONLY), buffered=buffered) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert command(tmp_path) == 1
    assert capsys.readouterr().err == "the standard output cannot be written: No space left on device\n"


def test_a_closed_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert command(tmp_path) == 0


def test_other_failures_are_not_taken_for_it(tmp_path: Path) -> None:
    def start(config: PlotConfig) -> int:
        raise BrokenPipeError("of a socket")

    command(tmp_path)
    with pytest.raises(BrokenPipeError, match="of a socket"):
        run_command("plot-runs", lambda: PlotConfig, start, [str(tmp_path)])


def test_ctrl_c_while_packages_are_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        """A finder in whose turn Ctrl-C comes."""

        def find_spec(self, name: str, *_: object) -> None:
            if name == "configs.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "configs.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert run_command("plot-runs", lambda: PlotConfig, lambda _: 0, []) == 130
    assert capsys.readouterr().err == "interrupted\n"
