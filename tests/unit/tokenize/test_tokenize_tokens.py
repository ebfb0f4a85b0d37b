"""The tokens themselves: width, EOS, control tokens, and tokenizers that are not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from trainer.data.shards import TokenPool

WHOLE = ("--heldout.fraction", "0")


def word_tokenizer(folder: Path, size: int, **special: str) -> Path:
    """`size` tokens: EOS `<eos>` is 0, word `w7` is 7."""
    words = {"<eos>": 0, **{f"w{n}": n for n in range(1, size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = special or {"eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("size", "width"), [(65_536, 2), (65_537, 4), (65_700, 4)])
def test_the_width_follows_the_vocabulary(tokenize: Any, tmp_path: Path, size: int, width: int) -> None:
    """Field case R45: an id above 65,535 is read back as itself, never modulo 65,536."""
    tokenizer = word_tokenizer(tmp_path / "words", size)
    ids = [n for n in (7, 65_535, 65_536, 65_600) if n < size]
    (tmp_path / "a.txt").write_text(" ".join(f"w{n}" for n in ids))
    answer = tokenize(tmp_path / "a.txt", "--output-dir", tmp_path / "out", "--tokenizer.name", tokenizer, *WHOLE)
    assert answer.code == 0, answer.err
    (shard,) = (tmp_path / "out" / "train").glob("*.ds")
    assert np.fromfile(shard, f"<u{width}").tolist() == [*ids, 0]
    assert Path(f"{shard}.metadata").read_text().splitlines()[0] == f"words|{width}"
    pool = TokenPool([tmp_path / "out" / "train"])
    assert pool.read(0, pool.num_tokens).tolist() == [*ids, 0]


def test_ids_with_gaps_count_by_the_highest(tokenize: Any, tmp_path: Path) -> None:
    """Field case R45: few tokens, but one of a high id."""
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 70_000}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(tmp_path / "words")
    (tmp_path / "a.txt").write_text("b")
    flags = ["--output-dir", tmp_path / "out", "--tokenizer.name", tmp_path / "words", *WHOLE]
    assert tokenize(tmp_path / "a.txt", *flags).code == 0
    (shard,) = (tmp_path / "out" / "train").glob("*.ds")
    assert np.fromfile(shard, "<u4").tolist() == [70_000, 0]


def test_one_eos_no_bos_and_nothing_cut(tokenize: Any, tiny_tokenizer: Path, tmp_path: Path) -> None:
    """Field case R24, for shards: what the tokenizer itself would add around a text is not added too."""
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json"))
    special = [("<|endoftext|>", 0)]
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A <|endoftext|>", special_tokens=special)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    fast.save_pretrained(tmp_path / "adds")
    (tmp_path / "a.txt").write_text("ba ko ri tu sel mon")
    outputs = []
    for name in (tmp_path / "adds", tiny_tokenizer):
        folder = tmp_path / f"out-{name.name}"
        assert tokenize(tmp_path / "a.txt", "--output-dir", folder, "--tokenizer.name", name, *WHOLE).code == 0
        (shard,) = (folder / "train").glob("*.ds")
        outputs.append(np.fromfile(shard, "<u2").tolist())
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 5 and outputs[0].count(0) == 1 and outputs[0][-1] == 0


def test_text_that_spells_a_control_token_stays_text(
    tokenize: Any, documents: Any, write_jsonl: Any, tmp_path: Path
) -> None:
    texts = ["ba<|endoftext|>ko", "<|endoftext|>", "<|pad|> ri<|endoftext|>", "tu"]
    write_jsonl(tmp_path / "a.jsonl", texts)
    answer = tokenize(tmp_path / "a.jsonl", "--output-dir", tmp_path / "out", "--no-shuffle", *WHOLE)
    assert answer.code == 0, answer.err
    assert "3 documents spell a control token; it was encoded as text" in answer.out
    assert documents(tmp_path / "out" / "train") == texts
    (shard,) = (tmp_path / "out" / "train").glob("*.ds")
    ids = np.fromfile(shard, "<u2")
    assert (ids == 0).sum() == 4 and (ids == 1).sum() == 0


def test_a_text_without_tokens_is_dropped(tokenize: Any, write_jsonl: Any, tmp_path: Path) -> None:
    """Field case R52: the tokenizer of words sees none in white space."""
    tokenizer = word_tokenizer(tmp_path / "words", 10)
    write_jsonl(tmp_path / "a.jsonl", [" \n ", "w3", ""])
    flags = ["--output-dir", tmp_path / "out", "--tokenizer.name", tokenizer, *WHOLE]
    answer = tokenize(tmp_path / "a.jsonl", *flags)
    assert answer.code == 0 and "dropped 2 documents without text" in answer.out
    pool = TokenPool([tmp_path / "out" / "train"])
    assert (pool.num_documents, pool.read(0, pool.num_tokens).tolist()) == (1, [3, 0])


def test_tokenizers_that_are_not_fit(tokenize: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w3")
    (tmp_path / "empty").mkdir()
    whole = Tokenizer(models.WordLevel({"END": 0, "a": 1}, unk_token="a"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="END").save_pretrained(tmp_path / "spelled")
    cases = [
        (word_tokenizer(tmp_path / "no-eos", 10, pad_token="w1"), "has no end-of-text token"),
        (
            tmp_path / "empty",
            f"no tokenizer could be loaded from the folder {tmp_path / 'empty'}: it holds no tokenizer.json (",
        ),
        (tmp_path / "gone", f"there is no folder {tmp_path / 'gone'}"),
        (tmp_path / "spelled", "makes a control token of the text END, and cannot be told not to"),
    ]
    for name, message in cases:
        answer = tokenize(tmp_path / "a.txt", "--output-dir", tmp_path / "out", "--tokenizer.name", name)
        assert answer.code == 2
        assert answer.err.startswith("tokenizer.name (flag --tokenizer.name): ") and message in answer.err
        assert not (tmp_path / "out").exists()


def test_a_document_that_the_tokenizer_cannot_encode(tokenize: Any, tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, unk_token="missing"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(tmp_path / "words")
    (tmp_path / "a.txt").write_text("a b")
    flags = ["--output-dir", tmp_path / "out", "--tokenizer.name", tmp_path / "words"]
    answer = tokenize(tmp_path / "a.txt", *flags)
    assert answer.code == 1
    assert answer.err.startswith("the tokenizer words cannot encode a document: WordLevel error")
    assert len(answer.err.splitlines()) == 1


def test_a_trained_eos_that_text_can_spell(tokenize: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("stop stop stop stop")
    flags = ["--tokenizer.train.vocab-size", "270", "--tokenizer.train.eos-token", "stop"]
    answer = tokenize(tmp_path / "a.txt", "--output-dir", tmp_path / "out", *flags)
    assert answer.code == 2 and "makes a control token of the text stop" in answer.err
    assert not (tmp_path / "out" / "train").exists()


def test_a_special_token_of_white_space_around_it(
    tokenize: Any, documents: Any, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """Added tokens that swallow the white space around them do not swallow it from text."""
    fast = PreTrainedTokenizerFast.from_pretrained(tiny_tokenizer)
    fast.add_special_tokens(
        {"additional_special_tokens": [AddedToken("<|x|>", lstrip=True, rstrip=True, special=True)]}
    )
    fast.save_pretrained(tmp_path / "strips")
    (tmp_path / "a.txt").write_text("ba  <|x|>  ko")
    flags = ["--output-dir", tmp_path / "out", "--tokenizer.name", tmp_path / "strips", *WHOLE]
    assert tokenize(tmp_path / "a.txt", *flags).code == 0
    assert documents(tmp_path / "out" / "train") == ["ba  <|x|>  ko"]


def test_the_two_tokenizer_options_exclude_each_other(tokenize: Any, tmp_path: Path) -> None:
    answer = tokenize("a.txt", "--output-dir", tmp_path, "--tokenizer.train.vocab-size", "300", "--tokenizer.name", "x")
    assert answer.code == 2
    assert "needs one of tokenizer.name and tokenizer.train.vocab_size; both are given" in answer.err
    answer = tokenize("a.txt", "--output-dir", tmp_path, "--tokenizer", "{}")
    assert "neither is given" in answer.err
    answer = tokenize("a.txt", "--output-dir", tmp_path, "--tokenizer.train.vocab-size", "257")
    assert "tokenizer.train.vocab_size" in answer.err and "258" in answer.err
