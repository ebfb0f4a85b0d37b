"""Which rows `inspect-data` shows: those that training reads. Its JSON, its faults, its pipe."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trainer.data.build import build_source
from trainer.data.digest import format_digest
from trainer.data.loader import RowLoader
from trainer.inspect.command import run_inspect

ARCH = """
[model]
init = {}
arch = { model_type = "llama", hidden_size = 16, intermediate_size = 32, num_hidden_layers = 1, num_attention_heads = 2,
num_key_value_heads = 2, vocab_size = 320 }
"""


@pytest.fixture
def train_toml(tiny_shards: Path, tiny_tokenizer: Path, tmp_path: Path) -> Path:
    """A config that `sft` takes."""
    path = tmp_path / "train.toml"
    path.write_text(
        f'max_steps = 100\n[tokenizer]\nname = "{tiny_tokenizer}"\n[data]\ntype = "tokens"\npaths = ["{tiny_shards}"]\n'
        f"seq_len = 64\nbatch_size = 6\nmicro_batch_size = 3\n{ARCH}"
    )
    return path


def _loader(config_file: Path, batch_size: int = 6) -> RowLoader:
    from configs.cli import resolve

    config = resolve(["@", str(config_file)]).config
    source = build_source(config.data, vocab_size=320, eos_token_id=0, tokenizer_name=config.tokenizer.name)
    options = {"dp_rank": 0, "dp_size": 1, "num_workers": 0, "pin_memory": False}
    return RowLoader(source, batch_size=batch_size, micro_batch_size=3, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [1, 62, 100])
def test_the_rows_of_a_step_are_those_that_training_reads(inspect: Callable, train_toml: Path, step: int) -> None:
    answer = inspect("@", train_toml, "--step", step, "--rows", 6, "--json", "--no-counts").json
    batches = _loader(train_toml).step(step - 1)
    for name in ("input_ids", "labels", "position_ids"):
        read = [row for batch in batches.micro_batches for row in getattr(batch, name).tolist()]
        assert [row[name] for row in answer["rows"]] == read
    lengths = [np.diff(batch.segments.host_cu_seqlens.numpy()).tolist() for batch in batches.micro_batches]
    shown = [row["segment_lengths"] for row in answer["rows"]]
    assert [[*a, *b, *c] for a, b, c in (shown[:3], shown[3:])] == lengths
    assert answer["digest"] == format_digest(batches.digest)
    assert [row["place"] for row in answer["rows"]] == list(range(6))


def test_a_step_over_the_end_of_an_epoch_says_so_row_by_row(inspect: Callable, train_toml: Path) -> None:
    rows_per_epoch = inspect("@", train_toml, "--rows", 0, "--json").json["counts"]["rows"]
    step, place = divmod(rows_per_epoch, 6)
    assert place, "the step must hold rows of both epochs"
    answer = inspect("@", train_toml, "--step", step + 1, "--rows", 99, "--json", "--no-counts").json
    expected = [(0, rows_per_epoch - place + i) for i in range(place)] + [(1, i) for i in range(6 - place)]
    assert [(row["epoch"], row["index"]) for row in answer["rows"]] == expected
    second = inspect("@", train_toml, "--epoch", 1, "--start", 0, "--rows", 1, "--json").json["rows"][0]
    assert second["input_ids"] == answer["rows"][place]["input_ids"]


def test_rows_of_an_epoch_from_a_start_and_at_random(inspect: Callable, train_toml: Path) -> None:
    rows = inspect("@", train_toml, "--start", 5, "--rows", 2, "--json", "--no-counts").json["rows"]
    assert [(row["place"], row["epoch"], row["index"]) for row in rows] == [(None, 0, 5), (None, 0, 6)]
    one, again, other = (
        [row["index"] for row in inspect("@", train_toml, "--sample", seed, "--rows", 5, "--json").json["rows"]]
        for seed in (1, 1, 2)
    )
    assert one == again != other
    assert len(set(one)) == 5


def test_json_is_one_document_and_the_text_is_that_of_the_tokens(
    inspect: Callable, train_toml: Path, tiny_tokenizer: Path
) -> None:
    """Notes (a dropped key here) go to stderr."""
    from transformers import AutoTokenizer

    answer = inspect("@", train_toml, "--step", 2, "--rows", 1, "--json")
    document = answer.json
    assert list(document) == [*("data", "template", "seq_len", "step", "digest", "rows", "counts", "dropped", "plan")]
    (row,) = document["rows"]
    assert list(row) == [
        *("place", "epoch", "index", "input_ids", "labels", "position_ids", "segment_lengths"),
        *("num_padding_tokens", "num_loss_tokens", "origins", "states", "pieces", "segment_texts", "text"),
    ]
    assert row["text"] == AutoTokenizer.from_pretrained(tiny_tokenizer).decode(row["input_ids"])
    assert row["text"] == "".join(row["pieces"]) == "".join(row["segment_texts"])
    assert row["states"] == ["no loss"] + ["loss"] * 63
    assert row["num_loss_tokens"] == 64
    assert document["plan"]["steps"] == 100
    noted = inspect("@", train_toml, "--data.type", "fake", "--rows", 0, "--json")
    assert noted.json["data"] == "1,000,000 made-up rows of 64 per epoch"
    assert "paths" in noted.err


def test_fake_rows_need_neither_model_nor_tokenizer(inspect: Callable) -> None:
    answer = inspect("--data.type", "fake", "--data.seq-len", 4, "--vocab-size", 50, "--rows", 1, "--json")
    (row,) = answer.json["rows"]
    assert row["pieces"] == [f"{id_} " for id_ in row["input_ids"]]
    assert row["labels"] == [(id_ + 1) % 50 for id_ in row["input_ids"]]
    assert answer.json["counts"]["loss_tokens"] == 4_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--start", 9999), "start (flag --start): 9999 is past the last row: an epoch has "),
        (("--step", 101), "step (flag --step): 101 is past the end: the run has 100 steps"),
        (("--step", 1, "--start", 1), "step (flag --step): cannot be given together with start"),
        (("--sample", 1, "--step", 1), "sample (flag --sample): cannot be given together with step"),
        (("--step", 1, "--epoch", 1), "epoch (flag --epoch): cannot be given together with step"),
        (("--rows", -1), "rows (flag --rows): must be at least 0, got -1"),
        (("--rowz", 1), "rowz (flag --rowz): unknown flag; did you mean --rows?"),
        (("--data.paths", "nowhere"), "data.paths (flag --data.paths): nowhere does not exist"),
        (("--max-steps", 9999, "--data.max-epochs", 1), "max_steps (flag --max-steps): 9,999 steps read the data"),
        (("--model.arch.vocab-size", 200), "model.arch.vocab_size (flag --model.arch.vocab-size): 200 is less than"),
        (("--step", 1, "--resume"), "run.name: is missing"),
    ],
)
def test_faults_are_those_of_a_config(
    inspect: Callable, train_toml: Path, arguments: tuple[object, ...], message: str
) -> None:
    answer = inspect("@", train_toml, *arguments)
    assert answer.code == 2
    assert answer.err.startswith(message)
    assert answer.out == ""


def test_tokens_need_their_tokenizer_and_fake_ids_a_bound(inspect: Callable, tiny_shards: Path) -> None:
    answer = inspect("--data.type", "tokens", "--data.paths", tiny_shards)
    assert (answer.code, answer.err) == (2, "tokenizer.name: data of type tokens needs a tokenizer\n")
    answer = inspect("--data.type", "fake")
    assert answer.code == 2
    assert answer.err.startswith("vocab_size: is missing")


def test_an_id_without_embedding_ends_with_the_file_and_no_traceback(
    inspect: Callable, tiny_toml: Callable, tmp_path: Path, write_shard: Callable[..., Path]
) -> None:
    shard = write_shard(tmp_path / "0.ds", [[2, 3, 0], [999, 4, 5, 0]])
    answer = inspect("@", tiny_toml(shard))
    assert answer.code == 1
    assert answer.err == f"{shard}: token 3 has id 999, but the model has only 300 embeddings\n"
    shown = inspect("@", tiny_toml(shard), "--vocab-size", 1000, "--rows", 1, "--no-counts")
    assert "⟦<id 999>⟧#→$" in shown.out


def test_a_resumed_run_reads_on_from_its_checkpoint(
    inspect: Callable, train_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that a run passed over on purpose are in the checkpoint's state."""
    loader = _loader(train_toml)
    loader.skip(10, 12)
    state = {"progress": {"step": 20}, "data": loader.state_dict(20)}
    monkeypatch.setattr("trainer.checkpoint.find_checkpoint", lambda folder, step, say: folder / "step_20")
    monkeypatch.setattr("trainer.checkpoint.read_state", lambda path: state)
    resumed = ("@", train_toml, "--resume", "--run.name", "one", "--output-dir", tmp_path, "--json", "--no-counts")
    assert inspect(*resumed, "--step", 21).json["digest"] == format_digest(_loader(train_toml).step(23).digest)
    early = inspect(*resumed, "--step", 20)
    assert early.code == 2
    assert early.err.startswith("step (flag --step): 20 is not after the checkpoint that [resume] goes on from")
    anew = inspect(*resumed, "--step", 21, "--ckpt.skip-dataloader").json["digest"]
    assert anew == format_digest(_loader(train_toml).step(0).digest)


def test_a_pipe_that_is_closed_early_gives_no_traceback(
    tiny_toml: Callable, tiny_shards: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`inspect-data ... | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        assert run_inspect(["@", str(tiny_toml(tiny_shards, seq_len=64)), "--rows", "100"]) == 141
        stream.write("what Python flushes at exit")
    assert capsys.readouterr().err == ""
