"""metrics.jsonl as a killed run may leave it: what a resume makes of it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.monitors.jsonl import JsonlMonitor

RECORDS = [{"step": 0, "params/total": 5}, *({"step": step, "loss/mean": 1 / step} for step in range(1, 5))]
LINES = [json.dumps(record).encode() + b"\n" for record in [*RECORDS, {"step": 4, "val/é/bpb@1k": 2.5}]]


def cut_back(path: Path, step: int) -> list[dict]:
    """What is left of the file after a resume at `step` and one more record."""
    monitor = JsonlMonitor(path)
    monitor.cut_back(step)
    kept = path.read_bytes()
    monitor.log(step + 1, {"loss/mean": 0.5})
    monitor.close()
    assert path.read_bytes().startswith(kept)
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_cut_at_any_byte(tmp_path: Path) -> None:
    """Whole lines up to the resumed step stay, nothing else does, and the next record is a line of its own."""
    content = b"".join(LINES)
    path = tmp_path / "metrics.jsonl"
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        whole = [json.loads(line) for line in content[:size].splitlines(keepends=True) if line.endswith(b"\n")]
        kept = [record for record in whole if record["step"] <= 3]
        assert cut_back(path, 3) == [*kept, {"step": 4, "loss/mean": 0.5}], size


@given(st.data())
def test_damaged_at_any_byte(tmp_path: Path, data: st.DataObject) -> None:
    """Lines that were not touched stay as they were; what is left is JSON, one record a line."""
    content = bytearray(b"".join(LINES))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    lines = bytes(content).split(b"\n")
    untouched = [record for record, line in zip(RECORDS, LINES[:5], strict=True) if line[:-1] in lines]
    left = cut_back(path, 3)
    assert [record for record in untouched if record["step"] <= 3 and record not in left] == []
    assert all(type(record["step"]) is int for record in left)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 200_000,
        b'{"step": true}',
        b'{"step": 1.0}',
        b'{"step": ' + b"9" * 10_000 + b"}",
        b'{"step": NaN}',
        b"\xff\xfe",
        b"\x00" * 4096,
        b'{"step": 1}{"step": 2}',
        b"",
    ],
    ids=["deep", "true", "fraction", "huge", "nan", "not utf-8", "zeros", "two", "empty"],
)
def test_a_line_that_is_no_record_is_dropped(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(LINES[0] + line + b"\n" + LINES[1])
    assert cut_back(path, 1) == [RECORDS[0], RECORDS[1], {"step": 2, "loss/mean": 0.5}]
