"""Reading metrics.jsonl: whole, while it grows, after a kill and after a rewind; damage is named by file and line."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from configs.errors import ConfigError
from configs.schema import flatten
from trainer.reports.records import MetricsFile, read_config, run_labels


def lines(*records: dict) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def opened(path: Path, content: str | bytes) -> MetricsFile:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    file = MetricsFile(path)
    file.update()
    return file


def test_last_value_of_a_step_counts(tmp_path: Path) -> None:
    file = opened(
        tmp_path / "m.jsonl",
        lines(
            {"step": 0, "n": 7}, {"step": 1, "a": 1.5}, {"step": 1, "a": 2.5, "b": None}, {"step": 3, "a": 4, "t": "x"}
        ),
    )
    assert file.column("a").steps.tolist() == [1, 3]
    assert file.column("a").values.tolist() == [2.5, 4.0]
    assert np.isnan(file.column("b").values).tolist() == [True]
    assert file.texts("t") == {3: "x"}
    assert (file.first_step, file.last_step) == (0, 3)
    assert (file.names, file.text_names) == (["n", "a", "b"], ["t"])
    assert file.column("nothing").steps.tolist() == []


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    file = opened(path, '{"step": 1, "a": 1}\n{"step": 2, "a"')
    assert file.column("a").steps.tolist() == [1]
    with path.open("a") as end:
        end.write(': 2}\n{"step": 3, "a": 3}\n')
    file.update()
    assert file.column("a").values.tolist() == [1, 2, 3]


def test_a_file_put_in_place_of_the_old_one_is_read_anew(tmp_path: Path) -> None:
    """What a run that resumes or goes back does, also when the new file is as long as the old one."""
    path = tmp_path / "m.jsonl"
    file = opened(path, lines({"step": 1, "a": 1}, {"step": 2, "a": 2}))
    for value in (5, 6):
        new = tmp_path / "new"
        new.write_text(lines({"step": 1, "a": value}, {"step": 3, "a": value}))
        new.replace(path)
        file.update()
        assert file.column("a").steps.tolist() == [1, 3]
        assert file.column("a").values.tolist() == [value, value]
    path.unlink()
    file.update()
    assert file.last_step is None


def test_a_file_cut_short_in_its_place_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    file = opened(path, lines({"step": 1, "a": 1}, {"step": 2, "a": 2}))
    path.write_text(lines({"step": 1, "a": 9}))
    file.update()
    assert (file.column("a").values.tolist(), file.last_step) == ([9], 1)


def test_steps_that_fall_are_sorted_and_the_later_line_counts(tmp_path: Path) -> None:
    file = opened(tmp_path / "m.jsonl", lines(*({"step": step, "a": i} for i, step in enumerate((1, 2, 3, 2, 4)))))
    assert file.column("a").steps.tolist() == [1, 2, 3, 4]
    assert file.column("a").values.tolist() == [0, 3, 2, 4]


def test_only_what_is_wanted_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(lines({"step": 1, "a": 1, "b": 2, "t": "x"}))
    file = MetricsFile(path, lambda name: name == "b")
    file.update()
    assert (file.names, file.text_names) == (["b"], [])


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"step": 2, "a": ', "is damaged: "),
        (b'{"step": 2, "a": NaN}', "is damaged: "),
        (b"\xff\xfe", "is damaged: "),
        (b"\x00" * 40, "is damaged: "),
        (b"", "is damaged: "),
        (b"[" * 5000, "is damaged: "),
        (b"[2]", 'is no record of metrics: it has no whole number as "step"'),
        (b'{"a": 1}', "is no record"),
        (b'{"step": true}', "is no record"),
        (b'{"step": 2.0}', "is no record"),
        (b'{"step": -1}', "is no record"),
        (b'{"step": 18446744073709551615}', "is no record"),
    ],
)
def test_damage_is_named_by_file_and_line(tmp_path: Path, line: bytes, fault: str) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(ConfigError) as error:
        opened(path, b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    assert f"{path}, line 2 {fault}" in str(error.value)


def test_values_that_are_no_metric_are_passed_over(tmp_path: Path) -> None:
    file = opened(
        tmp_path / "m.jsonl", lines({"step": 1, "a": [1], "b": {"c": 1}, "d": 1}, {"step": 2, "d": "now text"})
    )
    assert (file.names, file.column("d").steps.tolist(), file.texts("d")) == (["d"], [1], {2: "now text"})


def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is no plain file"):
        MetricsFile(path).update()


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000, "\udcff"])
def test_a_damaged_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "sft.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"configs/sft\.json is damaged"):
        read_config(tmp_path)


def test_flatten_keeps_lists_and_empty_tables() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": [{"e": 2}]}, "f": {}}) == {"a.b.c": 1, "a.d": [{"e": 2}], "f": {}}


def test_labels_are_as_short_as_tells_runs_apart() -> None:
    assert run_labels([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert run_labels([Path("/x/1/a"), Path("/x/2/a"), Path("/x/b")]) == ["1/a", "2/a", "x/b"]
    assert run_labels([Path("/")]) == ["/"]
