"""Progress in lines, and the summary."""

import pytest

from trainer import progress as progress_module
from trainer.progress import WorkProgress
from trainer.text import show_seconds
from trainer.tokenize.job import TaskProgress
from trainer.tokenize.report import TaskTotals, summary
from trainer.tokenize.writer import SideCounts, TaskCounts


def test_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
    said: list[str] = []
    progress = WorkProgress(description="tokenize", total=5_000_000, unit="kB", done=1_000_000, say=said.append)
    progress.update(1_500_000)
    clock[0] = 120.0
    progress.update(2_000_000, "; 7 documents")
    clock[0] = 121.0
    progress.update(2_100_000)
    progress.close()
    # 1,000 kB in 20 s, 3,000 to go
    assert said == ["tokenize: 2,000 of 5,000 kB (40%), ETA 1 min 0 s; 7 documents"]


def test_lines_without_a_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_LINE_SECONDS", 0)
    said: list[str] = []
    WorkProgress(description="tokenize", total=None, unit="documents", done=0, say=said.append).update(1234)
    assert said == ["tokenize: 1,234 documents"]


def test_totals_count_a_task_once() -> None:
    counts = TaskCounts(train=SideCounts(documents=3, tokens=30), heldout=SideCounts(documents=1, tokens=5))
    totals = TaskTotals({0: 100, 1: 200}, {0: counts})
    totals.update(TaskProgress(task=1, source_bytes=20, documents=2, tokens=7))
    totals.update(TaskProgress(task=1, source_bytes=50, documents=4, tokens=9))
    assert (totals.source_bytes, totals.documents, totals.tokens) == (150, 8, 44)


def test_the_summary() -> None:
    counts = TaskCounts(train=SideCounts(documents=1000, tokens=2000, bytes=8000), empty=2, bad=3, control_texts=4)
    assert summary(counts, text_key="body", num_shards=2, seconds=75.2) == [
        "train: 1,000 documents, 2,000 tokens, 8,000 bytes, 4.000 bytes/token",
        "heldout: 0 documents, 0 tokens, 0 bytes",
        "dropped 2 documents without text",
        "dropped 3 rows without text at 'body' or that could not be read",
        "4 documents spell a control token; it was encoded as text",
        "2,000 tokens in 2 shards; took 1 min 15 s",
    ]


def test_durations() -> None:
    assert [show_seconds(value) for value in (0.04, 59.9, 61, 3600, 7265)] == [
        "0.0 s",
        "59.9 s",
        "1 min 1 s",
        "1 h 0 min",
        "2 h 1 min",
    ]
