import io
import sys

import pytest

from trainer.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_part_has_a_bar_of_its_own_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    bar = ProgressBar(description="steps", total=10)
    for done in (1, 2):
        bar.update_part("validation", done, 3)
    assert bar._progress is not None
    bar._progress.refresh()
    assert terminal.getvalue().count("validation") >= 1
    assert [(task.description, task.completed) for task in bar._progress.tasks] == [("steps", 0), ("validation", 2)]
    bar.update_part("validation", 3, 3)
    assert [task.description for task in bar._progress.tasks] == ["steps"]
    bar.update_part("validation", 1, 3)
    assert [task.completed for task in bar._progress.tasks] == [0, 1]
    bar.close()
    bar.update_part("validation", 2, 3)
