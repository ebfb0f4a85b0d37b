"""Bars over several things, one after the other; lines where there is no terminal."""

import io
import sys

import pytest

from trainer import progress as progress_module
from trainer.progress import ProgressBars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_with_eta_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
    with ProgressBars() as bars:
        bars.track("tokenising chats", 0, 3000)
        clock[0] = 110.0
        bars.track("tokenising chats", 500, 3000)
        clock[0] = 120.0
        bars.track("tokenising chats", 1000, 3000)
        clock[0] = 200.0
        bars.track("tokenising others", 0, 50)
        clock[0] = 216.0
        bars.track("tokenising others", 10, 50)
    # 1,000 in 20 s, 2,000 to go; then 10 in 16 s, 40 to go
    assert capsys.readouterr().out == (
        "tokenising chats: 1,000 of 3,000 (33%), ETA 40.0 s\ntokenising others: 10 of 50 (20%), ETA 1 min 4 s\n"
    )


def test_one_bar_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two live displays on one terminal are an error of rich; the bar of what is over stays as it is."""
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with ProgressBars() as bars:
        for what in ("first", "second"):
            for done in range(3):
                bars.track(what, done, 2)
            assert sys.stdout is not terminal  # a bar has it
    assert sys.stdout is terminal
    text = terminal.getvalue()
    assert 0 <= text.index("first") < text.index("second")
    assert text.count("2/2") >= 2
