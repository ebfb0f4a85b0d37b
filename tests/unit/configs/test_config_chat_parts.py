"""Parts of chats in the config: names, subsets and splits that pair up, probabilities, what must exist."""

from pathlib import Path
from typing import Any

import pytest

from configs.cli import resolve
from configs.data import ChatPart, SFTDataConfig, is_dataset_id
from configs.errors import ConfigError
from configs.sft import SFTConfig

ONE_EACH = "give one per part of the data, or one for all parts"
RUN = ["--model.arch.model_type=llama", "--model.init={}", "--max-steps=1"]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").touch()


def parts(**values: Any) -> list[tuple[str, str | None, str | None]]:
    config = SFTDataConfig.model_validate(values)
    assert SFTDataConfig.model_validate_json(config.model_dump_json()) == config
    assert all(isinstance(part, ChatPart) for part in config.parts)
    return [(part.name, part.subset, part.split) for part in config.parts]


def faults(*flags: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        resolve([*RUN, *flags])
    return {fault.key: fault.message for fault in caught.value.faults}


def test_a_single_value_holds_for_all_parts():
    assert parts(name="a") == [("a", None, None)]
    assert parts(name="a", splits=["x", "y"]) == [("a", None, "x"), ("a", None, "y")]
    assert parts(name=["a", "b"], subsets=["s"], splits=["x", "y"]) == [("a", "s", "x"), ("b", "s", "y")]
    assert parts(name=["a"], subsets=["s", None], splits=["x"]) == [("a", "s", "x"), ("a", None, "x")]
    assert parts(name=["a", "b"]) == [("a", None, None), ("b", None, None)]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ["--data.name", "a.jsonl", "o/b", "--data.subsets", "s", "t", "u"],
            {"data.subsets": "name has 2 and subsets has 3 entries: " + ONE_EACH},
        ),
        (
            ["--data.name=a.jsonl", "--data.subsets", "s", "t", "--data.splits", "x", "y", "z"],
            {"data.splits": "subsets has 2 and splits has 3 entries: " + ONE_EACH},
        ),
        (["--data.name", "a.jsonl", "--data.splits", '["x", ""]'], {"data.splits": "one of them is empty"}),
        (["--data.name", '["a.jsonl", ""]'], {"data.name": "one of them is empty"}),
        (
            ["--data.name=a.jsonl", "--data.probabilities", "0.5", "0.5"],
            {"data.probabilities": "has 2 entries, the data 1 parts; give one for each part"},
        ),
        (
            ["--data.name", "a.jsonl", "o/b", "--data.probabilities", "0.5", "0.4"],
            {"data.probabilities": "their sum is 0.9, not 1"},
        ),
        (
            ["--data.name", "a.jsonl", "--data.stopping-strategy", "first_exhausted"],
            {
                "data.stopping_strategy": '"first_exhausted" does nothing without probabilities; give those too, or '
                "leave it out"
            },
        ),
        (
            ["--val.interval=1", "--data.name=a.jsonl", "--val.data.name=a.jsonl", "--val.data.splits", "x", ""],
            {"val.data.splits": "one of them is empty"},
        ),
    ],
)
def test_what_does_not_go_together(flags: list[str], expected: dict[str, str]):
    assert faults(*flags) == expected


def test_probabilities_need_not_sum_to_one_exactly():
    flags = ["--data.name", "a.jsonl", "o/b", "o/c", "--data.probabilities", "0.3333333", "0.3333333", "0.3333333"]
    config: SFTConfig = resolve([*RUN, *flags, "--data.stopping-strategy=first_exhausted"]).config
    assert isinstance(config.data, SFTDataConfig) and config.data.stopping_strategy == "first_exhausted"


def test_names_that_can_only_be_paths_must_be_there():
    flags = ["--val.interval=1", "--val.data.name=./gone", "--data.name", "a.jsonl", "org/chats", "b.jsonl"]
    assert faults(*flags) == {"data.name": "b.jsonl does not exist", "val.data.name": "gone does not exist"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chats", True),
        ("org/chats-1.5", True),
        ("org/chats.jsonl", False),
        ("chats.JSONL.gz", False),
        ("chats.parquet", False),
        ("./chats", False),
        ("/data/chats", False),
        ("a/b/c", False),
        ("chats/", False),
    ],
)
def test_which_names_can_be_ids(name: str, expected: bool):
    assert is_dataset_id(name) is expected
