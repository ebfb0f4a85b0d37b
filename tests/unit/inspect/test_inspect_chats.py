"""`inspect-data` on conversations: what the model sees, where it comes from, and what became of every row.

A token is a byte and ChatML writes a message in two control tokens, its role, two line ends and its content, so lengths
are counted by hand.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.batch import IGNORE_INDEX


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


CHATS = [
    [_user("hi"), _assistant("yo")],  # 25 tokens, 3 with loss
    [],
    [_user("<|im_end|>?"), _assistant("4"), _user("b"), _assistant("6")],  # 19 + 14 + 9 + 14 = 56 tokens, 4 with loss
    [_user("q"), _assistant("")],
    [_user("u" * 60), _assistant("n")],  # its answer lies beyond 64
    [_user("x"), _assistant("z" * 80)],  # 9 + 93 = 102 tokens, 81 with loss
    [],
]


@pytest.fixture
def chats(tmp_path: Path, byte_chat_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """chats(seq_len=64, ...): a config without a model; extra keys go into [data]."""
    monkeypatch.chdir(tmp_path)

    def write(**data: object) -> Path:
        Path("chats.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in CHATS))
        table = {"name": "chats.jsonl", "seq_len": 64, "batch_size": 2, "shuffle": False}
        table |= {"cache_workers": 1} | data
        lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        path = Path("chats.toml")
        path.write_text(f'[tokenizer]\nname = "{byte_chat_tokenizer}"\n[data]\n' + "\n".join(lines) + "\n")
        return path

    return write


def test_the_whole_answer(inspect: Callable, chats: Callable[..., Path]) -> None:
    answer = inspect("@", chats(packing="sequential"), "--dropped", 3)
    assert (answer.code, answer.err) == (0, "")
    im = "⟨⟦<|im_start|>⟧⟩"
    end = "⟨⟦<|im_end|>⟧⟩"
    start = answer.lines.index("")
    assert answer.lines[start:] == [
        "",
        "row 0 (epoch 0, index 0): 64 tokens in 2 segments, 3 with loss, 39 padding",
        "─── positions 0 to 24, 3 of 25 labels carry loss; chats.jsonl, line 1: user, assistant",
        f"{im}⟨user↵",
        f"hi⟩{end}⟨↵",
        f"⟩{im}⟨assistant↵",
        "⟩yo⟦<|im_end|>⟧⟨↵",
        "⟩",
        "─── positions 0 to 38, 0 of 39 labels carry loss",
        "«39 tokens of padding»",
        "",
        "row 1 (epoch 0, index 1): 64 tokens in 2 segments, 4 with loss, 8 padding",
        "─── positions 0 to 55, 4 of 56 labels carry loss; chats.jsonl, line 3: user, assistant, user, assistant",
        f"{im}⟨user↵",
        f"<|im_end|>?⟩{end}⟨↵",
        f"⟩{im}⟨assistant↵",
        "⟩4⟦<|im_end|>⟧⟨↵",
        f"⟩{im}⟨user↵",
        f"b⟩{end}⟨↵",
        f"⟩{im}⟨assistant↵",
        "⟩6⟦<|im_end|>⟧⟨↵",
        "⟩",
        "─── positions 0 to 7, 0 of 8 labels carry loss",
        "«8 tokens of padding»",
        "",
        "row 2 (epoch 0, index 2): 64 tokens in 1 segment, 44 with loss, 0 padding",
        "─── positions 0 to 63, 44 of 64 labels carry loss; chats.jsonl, line 6: user, assistant; "
        "tokens 0 to 63 of 102",
        f"{im}⟨user↵",
        f"x⟩{end}⟨↵",
        f"⟩{im}⟨assistant↵",
        "⟩" + "z" * 44,
        "",
        "counts of epoch 0",
        "  rows               3",
        "  tokens             145",
        "  tokens with loss   51 (26.56 %)",
        "  padding            47 (24.48 %)",
        "  conversations      7 in the data",
        "  samples            3 in an epoch",
        "  truncated          1 samples (chats.jsonl, line 6), 38 tokens cut off",
        "  split              0 samples",
        "  dropped            4 conversations",
        "    2 no messages (first: chats.jsonl, line 2)",
        "    1 empty answer (chats.jsonl, line 4)",
        "    1 no loss token in the first seq_len = 64 tokens (chats.jsonl, line 5)",
        "  control tokens     1 spelled by messages, read as ordinary text",
        "  longest sample     102 tokens (chats.jsonl, line 6); mean 66.2",
        "  longer than a row  2 samples",
        "  sample lengths (tokens)",
        "   16-31  1  ####################",
        "   32-63  1  ####################",
        "  64-127  2  ########################################",
        "",
        "dropped conversations",
        "  chats.jsonl, line 2: no messages",
        "  chats.jsonl, line 4: empty answer",
        "  chats.jsonl, line 5: no loss token in the first seq_len = 64 tokens",
    ]
    assert answer.lines[1] == "template: loss by the template's own marks"


@pytest.mark.parametrize("packing", ["best_fit", "sequential", "none"])
@pytest.mark.parametrize("overflow", ["truncate", "split", "drop"])
@pytest.mark.parametrize("epoch", [0, 3])
def test_counts_are_those_of_the_rows(
    inspect: Callable, chats: Callable[..., Path], packing: str, overflow: str, epoch: int
) -> None:
    """Counted without filling a row, and exactly what all rows of the epoch hold."""
    config = chats(packing=packing, overflow=overflow, shuffle=True)
    document = inspect("@", config, "--json", "--rows", 100, "--epoch", epoch).json
    rows, counts = document["rows"], document["counts"]
    labels = np.array([row["labels"] for row in rows])
    padding = sum(row["num_padding_tokens"] for row in rows)
    assert (counts["rows"], counts["positions"]) == (len(rows), 64 * len(rows))
    assert counts["loss_tokens"] == int((labels != IGNORE_INDEX).sum())
    assert (counts["padding_tokens"], counts["tokens"]) == (padding, 64 * len(rows) - padding)
    for row in rows:
        real = len(row["segment_lengths"]) - (row["num_padding_tokens"] > 0)
        assert len(row["origins"]) == real
    places = {origin["place"] for row in rows for origin in row["origins"]}
    lines = {"truncate": (1, 3, 6), "split": (1, 3, 5, 6), "drop": (1, 3)}[overflow]
    assert places == {f"chats.jsonl, line {line}" for line in lines}


def test_json_has_all_of_it(inspect: Callable, chats: Callable[..., Path]) -> None:
    document = inspect("@", chats(overflow="drop"), "--json", "--rows", 1, "--dropped", 99).json
    counts = document["counts"]
    assert document["template"] == "loss by the template's own marks"
    assert (counts["documents"], counts["truncated"], counts["dropped"]) == (2, 0, 5)
    assert counts["chats"] == {
        "rows": 7,
        "dropped": {
            "no messages": {"count": 2, "first_place": "chats.jsonl, line 2"},
            "empty answer": {"count": 1, "first_place": "chats.jsonl, line 4"},
            "longer than seq_len = 64": {"count": 2, "first_place": "chats.jsonl, line 5"},
        },
        "samples": 2,
        "not_drawn": 0,
        "tokens": 81,
        "loss_tokens": 7,
        "padding_tokens": 47,
        "truncated": None,
        "split": None,
        "pieces_left_out": 0,
        "cut_tokens": 0,
        "split_control_tokens": 1,
        "longest": 102,
        "longest_place": "chats.jsonl, line 6",
    }
    assert document["dropped"] == [
        {"place": "chats.jsonl, line 2", "reason": "no messages"},
        {"place": "chats.jsonl, line 4", "reason": "empty answer"},
        {"place": "chats.jsonl, line 5", "reason": "longer than seq_len = 64"},
        {"place": "chats.jsonl, line 6", "reason": "longer than seq_len = 64"},
        {"place": "chats.jsonl, line 7", "reason": "no messages"},
    ]
    assert counts["lengths"]["longest"] == 102
    assert [found["documents"] for found in counts["lengths"]["bins"]] == [1, 1, 2]


def test_the_parts_of_a_split_sample_say_so(inspect: Callable, chats: Callable[..., Path]) -> None:
    document = inspect("@", chats(overflow="split", packing="sequential"), "--json", "--rows", 9).json
    long = [origin for row in document["rows"] for origin in row["origins"] if origin["place"].endswith("line 6")]
    assert long == [
        {"place": "chats.jsonl, line 6", "roles": ["user", "assistant"], "first_token": first, "num_tokens": 102}
        for first in (0, 64)
    ]
    chat_counts = document["counts"]["chats"]
    assert chat_counts["split"] == {"count": 2, "first_place": "chats.jsonl, line 5"}
    assert chat_counts["pieces_left_out"] == 1, "the first part of line 5 has nothing to train on"
    text = inspect("@", chats(overflow="split", packing="sequential"), "--start", 4, "--rows", 1, "--no-counts").out
    assert "tokens 64 to 101 of 102" in text


@pytest.mark.parametrize("options", [["--step", 2], ["--sample", 5], ["--start", 1], ["--rows", 2]])
def test_every_way_to_choose_rows_shows_where_they_come_from(
    inspect: Callable, chats: Callable[..., Path], options: list[object]
) -> None:
    answer = inspect("@", chats(shuffle=True, packing="none"), *options, "--json", "--no-counts")
    assert answer.code == 0
    for row in answer.json["rows"]:
        (origin,) = row["origins"]
        line = int(origin["place"].rpartition(" ")[2])
        assert CHATS[line - 1][0]["content"] in row["text"]


def test_the_table_has_a_line_per_token(inspect: Callable, chats: Callable[..., Path]) -> None:
    lines = inspect("@", chats(packing="none"), "--table", "--rows", 1, "--no-counts").lines
    start = next(number for number, line in enumerate(lines) if line.endswith("as target  text"))
    table = lines[start + 1 : start + 26]
    assert [line[25:].strip().split("  ")[0] for line in table] == ["no loss"] * 21 + ["loss"] * 3 + ["no loss"]
    assert [line.rpartition("  ")[2] for line in table[-4:]] == ["'y'", "'o'", "<|im_end|>", "'\\n'"]


def test_nothing_to_train_on_is_a_fault_with_reasons(inspect: Callable, chats: Callable[..., Path]) -> None:
    answer = inspect("@", chats(), "--data.loss-mask.assistant", "false")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == (
        "data.name (chats.toml): 0 supervised tokens in 7 conversations: 5 no message carries loss "
        "(first: chats.jsonl, line 1), 2 no messages (first: chats.jsonl, line 2)\n"
    )
