"""What `inspect-data` prints: exact text for tiny shards, with and without colours."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trainer.inspect.render import Style, render_selection
from trainer.inspect.rows import Selection, ShownRow
from trainer.inspect.token_text import TokenText

Letters = Callable[[str], list[int]]
LEGEND = "target with loss, ⟨no loss⟩, «padding», ⟦control token⟧; → target beyond its document or row, ↵ line end"


@pytest.fixture
def shard(tmp_path: Path, letters: Letters, write_shard: Callable[..., Path]) -> Path:
    """12 tokens: a b newline EOS | the three bytes of a euro sign, c, EOS | escape, d, EOS."""
    documents = [[*letters("ab\n"), 0], [*letters("€c"), 0], [*letters("\x1bd"), 0]]
    return write_shard(tmp_path / "shards" / "0.ds", documents)


def test_rows_of_a_tiny_shard(inspect: Callable, tiny_toml: Callable, shard: Path) -> None:
    """Characters that are cut by a row show as bytes, an escape character never reaches the terminal."""
    answer = inspect("@", tiny_toml(shard))
    assert answer.code == 0
    assert answer.err == ""
    assert answer.lines == [
        "data: 12 tokens in 3 documents: 2 rows of 5 per epoch, 2 tokens left out of each",
        LEGEND,
        "",
        "row 0 (epoch 0, index 0): 5 tokens in 2 segments, 5 with loss, 0 padding",
        "─── positions 0 to 3, 4 of 4 labels carry loss",
        "⟨a⟩b↵",
        "⟦<|endoftext|>⟧",
        "─── positions 0 to 0, 1 of 1 labels carry loss",
        "\\xe2→\\x82",
        "",
        "row 1 (epoch 0, index 1): 5 tokens in 2 segments, 5 with loss, 0 padding",
        "─── positions 0 to 3, 4 of 4 labels carry loss",
        "⟨\\x82⟩\\xacc⟦<|endoftext|>⟧",
        "─── positions 0 to 0, 1 of 1 labels carry loss",
        "\\x1b→d",
        "",
        "counts of epoch 0",
        "  rows               2",
        "  tokens             12, 2 of them left out of this epoch",
        "  tokens with loss   10 (100 %)",
        "  padding            0 (0 %)",
        "  truncated          0 samples",
        "  dropped            0 samples",
        "  documents          3",
        "  longest document   5 tokens; mean 4.0",
        "  longer than a row  0 documents",
        "  document lengths (tokens)",
        "  2-3  1  ####################",
        "  4-7  2  ########################################",
    ]


def test_without_document_masking_a_row_is_one_segment(inspect: Callable, tiny_toml: Callable, shard: Path) -> None:
    answer = inspect("@", tiny_toml(shard, document_masking=False), "--no-counts", "--start", 1, "--rows", 1)
    assert answer.lines[2:] == [
        "",
        "row 1 (epoch 0, index 1): 5 tokens in 1 segment, 5 with loss, 0 padding",
        "─── positions 0 to 4, 5 of 5 labels carry loss",
        "⟨\\x82⟩\\xacc⟦<|endoftext|>⟧\\x1b→d",
    ]


def test_tokens_that_a_loss_file_does_not_count(
    inspect: Callable, tiny_toml: Callable, tmp_path: Path, letters: Letters, write_shard: Callable[..., Path]
) -> None:
    shard = write_shard(tmp_path / "0.ds", [[*letters("abcd"), 0]] * 2, loss=[1, 0, 0, 1, 1] * 2)
    answer = inspect("@", tiny_toml(shard, seq_len=8), "--rows", 1)
    assert answer.lines[3:8] == [
        "row 0 (epoch 0, index 0): 8 tokens in 2 segments, 4 with loss, 0 padding",
        "─── positions 0 to 4, 3 of 5 labels carry loss",
        "⟨abc⟩d⟦<|endoftext|>⟧",
        "─── positions 0 to 2, 1 of 3 labels carry loss",
        "a⟨bc⟩→d",
    ]
    assert "  tokens with loss   4 (50 %)" in answer.lines


def test_the_table_lists_every_token(inspect: Callable, tiny_toml: Callable, shard: Path, letters: Letters) -> None:
    answer = inspect("@", tiny_toml(shard), "--no-counts", "--rows", 1, "--table")
    a, b, end = letters("ab\n")
    euro, second, _ = letters("€")
    assert answer.lines[4:] == [
        "─── positions 0 to 3, 4 of 4 labels carry loss",
        "position      id   label  as target  text",
        f"       0 {a:>7} {b:>7}  no loss    'a'",
        f"       1 {b:>7} {end:>7}  loss       'b'",
        f"       2 {end:>7}       0  loss       '\\n'",
        f"       3       0 {euro:>7}  loss       <|endoftext|>",
        "─── positions 0 to 0, 1 of 1 labels carry loss",
        "position      id   label  as target  text",
        f"       0 {euro:>7} {second:>7}  loss       '\\xe2'  → '\\x82'",
    ]


def _row(**changes: object) -> ShownRow:
    """Two samples, of which the second has loss on its end, and padding."""
    values: dict = {
        "place": 3,
        "epoch": 1,
        "index": 7,
        "input_ids": np.array([5, 6, 7, 8, 9, 1, 1]),
        "labels": np.array([-100, 7, -100, 9, -100, -100, -100]),
        "position_ids": np.array([0, 1, 2, 0, 1, 0, 1]),
        "segment_lengths": np.array([3, 2, 2]),
        "num_padding": 2,
    }
    return ShownRow(**values | changes)


def test_padding_and_loss_in_plain_marks() -> None:
    """Rendering knows rows only, so what other types of data bring shows too: padding, samples without loss at the
    start."""
    selection = Selection(rows=[_row()], step=4, digest="00ff")
    lines = list(render_selection(selection, TokenText(None), Style(colours=False), table=False))
    assert lines == [
        "step 4: digest/rows 00ff",
        LEGEND,
        "",
        "row 3 of the step (epoch 1, index 7): 7 tokens in 3 segments, 2 with loss, 2 padding",
        "─── positions 0 to 2, 1 of 3 labels carry loss",
        "⟨5 6 ⟩7 ",
        "─── positions 0 to 1, 1 of 2 labels carry loss",
        "⟨8 ⟩9 ",
        "─── positions 0 to 1, 0 of 2 labels carry loss",
        "«2 tokens of padding»",
    ]


def test_padding_and_loss_in_colours() -> None:
    selection = Selection(rows=[_row()])
    lines = list(render_selection(selection, TokenText(None), Style(colours=True), table=False))
    assert lines[3:] == [
        "\x1b[36m─── positions 0 to 2, 1 of 3 labels carry loss\x1b[0m",
        "\x1b[90m5 6 \x1b[0m\x1b[32m7 \x1b[0m",
        "\x1b[36m─── positions 0 to 1, 1 of 2 labels carry loss\x1b[0m",
        "\x1b[90m8 \x1b[0m\x1b[32m9 \x1b[0m",
        "\x1b[36m─── positions 0 to 1, 0 of 2 labels carry loss\x1b[0m",
        "\x1b[34m2 tokens of padding\x1b[0m",
    ]


def test_colours_only_on_a_terminal_without_no_color(
    inspect: Callable, tiny_toml: Callable, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("@", tiny_toml(shard), "--rows", 1, "--no-counts")
    plain = inspect(*arguments).out
    monkeypatch.setattr("trainer.progress.is_terminal", lambda stream: True)
    coloured = inspect(*arguments).lines
    assert coloured[5:7] == ["\x1b[90ma\x1b[0m\x1b[32mb↵\x1b[0m", "\x1b[7;32m<|endoftext|>\x1b[0m"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert inspect(*arguments).out == plain


def test_a_label_that_does_not_follow_in_the_row_stands_behind_an_arrow() -> None:
    """A truncated sample's last target is a token that its row does not hold."""
    row = _row(labels=np.array([-100, 7, 42, 9, -100, -100, -100]))
    lines = list(render_selection(Selection(rows=[row]), TokenText(None), Style(colours=False), table=False))
    assert lines[4] == "⟨5 6 ⟩7 →42 "


def test_letters_that_the_encoding_of_stdout_lacks(
    inspect: Callable, tiny_toml: Callable, shard: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ("@", tiny_toml(shard), "--rows", 1, "--no-counts")
    with (tmp_path / "out").open("w", encoding="ascii") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        assert inspect(*arguments).code == 0
    assert "\\u27e8a\\u27e9b\\u21b5" in (tmp_path / "out").read_text()


@pytest.mark.parametrize("option", ["--no-table", "--table", "--json"])
def test_no_control_character_of_the_data_reaches_the_terminal(
    inspect: Callable,
    tiny_toml: Callable,
    tmp_path: Path,
    letters: Letters,
    write_shard: Callable[..., Path],
    option: str,
) -> None:
    """Escapes, C1 codes, changes of direction; and any bytes that are no text at all."""
    text = "".join(map(chr, range(0x250))) + "\u202e\u2028\u200f\ufeff"
    stray = np.random.default_rng(0).permutation(np.repeat(letters("".join(map(chr, range(0x100)))), 4)).tolist()
    ids = [*letters(text), 0, *stray, 0]
    answer = inspect("@", tiny_toml(write_shard(tmp_path / "0.ds", [ids]), seq_len=len(ids) - 1), option)
    assert answer.code == 0
    assert [c for c in answer.out if not c.isprintable() and c != "\n"] == []
    if option != "--json":
        assert "\\x1b" in answer.out
        assert "\\u202e" in answer.out
