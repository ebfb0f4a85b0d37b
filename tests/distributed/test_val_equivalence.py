"""Held-out data of every kind through the real command: no metric moves with ranks, micro-batches or packing order, and
nor do the records of single documents."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from configs.sft import SFTConfig
from trainer.evaluate import evaluate
from trainer.run import Run, StopSignal

COMMAND = [str(Path(sys.executable).with_name("sft"))]
SEQ_LENS = [32, 96]
SETS = ("shards", "texts", "continuations", "pairs", "choices")
EOS_ID = 2


def some_text(generator: np.random.Generator, most: int) -> str:
    return " ".join(generator.choice(["a", "the dog", "東京", "🐕", "x = 1"], generator.integers(1, most)))


@pytest.fixture(scope="module")
def config(
    tmp_path_factory: pytest.TempPathFactory, byte_chat_tokenizer: Path, write_shard: Callable[..., Path]
) -> dict[str, Any]:
    """7 conversations and 7 to 30 documents of each kind: numbers that 2 and 4 ranks do not share evenly."""
    generator, folder = np.random.default_rng(0), tmp_path_factory.mktemp("equivalence")
    documents = [[*generator.integers(3, 250, size), EOS_ID] for size in generator.integers(1, 200, 30)]
    write_shard(folder / "sets" / "shards" / "00000.ds", documents, tokenizer="bytes")
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SETS[1:]}
    for number in range(13):
        context = some_text(generator, 12)
        options = [f" {some_text(generator, 5)}" for _ in range(2 + number % 3)]
        rows["texts"].append({"text": some_text(generator, 60)})
        rows["continuations"].append({"context": context, "continuation": options[0]})
        rows["pairs"].append({"context": context, "chosen": options[0], "rejected": options[1]})
        rows["choices"].append({"context": context, "choices": options, "answer": number % 2})
    for name, table in rows.items():
        (folder / "sets" / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in table))
    chats = [
        {"messages": [{"role": "user", "content": "b" * number}, {"role": "assistant", "content": "c" * 2 * number}]}
        for number in range(1, 8)
    ]
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    arch = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    arch |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return {
        "max_steps": 0,
        "model": {"arch": arch, "init": {"std": 0.2}, "compute_dtype": "float32"},
        "tokenizer": {"name": str(byte_chat_tokenizer)},
        "val": {
            "data": {"name": str(folder / "chats.jsonl"), "seq_len": 64, "cache_workers": 1},
            "data_dir": str(folder / "sets"),
            "sets": list(SETS),
            "seq_lens": SEQ_LENS,
            "context": "prefix",
            "micro_batch_tokens": 96,
            "save_arrays": True,
        },
        "output_dir": str(folder),
    }


def with_val(config: dict[str, Any], name: str, **changes: Any) -> dict[str, Any]:
    """The config of run `name`, with other micro-batches."""
    data = config["val"]["data"] | changes.pop("data", {})
    return config | {"run": {"name": name}, "val": config["val"] | {"data": data} | changes}


def result(config: dict[str, Any]) -> tuple[dict[str, float], dict[str, list[dict[str, Any]]]]:
    """Metrics and records of a run that has ended."""
    run_dir = Path(config["output_dir"]) / config["run"]["name"]
    (record,) = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    arrays = {name: pq.read_table(run_dir / "val" / "step_0" / f"{name}.parquet").to_pylist() for name in SETS}
    return {name: value for name, value in record.items() if name.startswith("val/")}, arrays


def run_here(config: dict[str, Any]) -> None:
    run_dir = Path(config["output_dir"]) / config["run"]["name"]
    run_dir.mkdir()
    evaluate(SFTConfig.model_validate(config), Run(dir=run_dir, attempt=0, stop=StopSignal()))


def run_command(config: dict[str, Any], ranks: int) -> None:
    path = Path(config["output_dir"]) / f"{config['run']['name']}.json"
    path.write_text(json.dumps(config | {"deployment": {"num_train_gpus": ranks}}))
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*COMMAND, "@", path], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def one_rank(config: dict[str, Any]) -> tuple[dict[str, float], dict[str, list[dict[str, Any]]]]:
    """Scored by one rank, in this process."""
    own = with_val(config, "one_rank")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            patch.setenv(name, value)
        run_here(own)
    return result(own)


def assert_same(found: Any, expected: Any) -> None:
    """Every metric to 1e-6; shares of documents, and counts of tokens and bytes, exactly."""
    (metrics, arrays), (expected_metrics, expected_arrays) = found, expected
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        exact = "/acc" in name
        assert metrics[name] == (value if exact else pytest.approx(value, rel=1e-6, abs=1e-6)), name
    for name in SETS:
        assert len(arrays[name]) == len(expected_arrays[name])
        for record, expected_record in zip(arrays[name], expected_arrays[name], strict=True):
            for key in ("seq_len", "document", "tokens", "bytes", "correct"):
                assert record[key] == expected_record[key]
            for key in ("nats", "option_nats"):
                wanted = expected_record[key]
                assert record[key] == (None if wanted is None else pytest.approx(wanted, rel=1e-6, abs=1e-5))


def test_the_metrics_are_all_there(one_rank: Any) -> None:
    """Field case R105: each of 7 conversations and of the documents counts once."""
    metrics, arrays = one_rank
    kinds = {
        "shards": ("loss", "perplexity", "bpb"),
        "texts": ("loss", "perplexity", "bpb"),
        "continuations": ("loss", "bpb", "acc"),
        "pairs": ("acc", "acc_norm", "margin"),
        "choices": ("acc", "acc_norm"),
    }
    names = [f"val/{set_}/{name}@{length}" for set_, names in kinds.items() for name in names for length in SEQ_LENS]
    assert metrics.keys() == {"val/loss", "val/perplexity", *names}
    counted = {name: sorted((row["seq_len"], row["document"]) for row in arrays[name]) for name in SETS}
    for name in SETS:
        of_longer = [document for length, document in counted[name] if length == 96]
        assert of_longer == list(range(30 if name == "shards" else 13))
        assert len(set(counted[name])) == len(counted[name])


@pytest.mark.parametrize("micro_batch_tokens", [400, 5000])
def test_micro_batches_change_nothing(
    config: dict[str, Any], one_rank: Any, micro_batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case R106: rows alone and many at a time; chats packed otherwise."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    data = {"packing": "none", "micro_batch_size": 4} if micro_batch_tokens == 400 else {"packing": "sequential"}
    own = with_val(config, f"micro_{micro_batch_tokens}", micro_batch_tokens=micro_batch_tokens, data=data)
    run_here(own)
    assert_same(result(own), one_rank)


@pytest.mark.parametrize(
    ("ranks", "micro_batch_tokens", "layout"), [(2, 96, {}), (4, 200, {"dp_replicate": 2, "cp": 2})]
)
def test_ranks_change_nothing(
    config: dict[str, Any], one_rank: Any, ranks: int, micro_batch_tokens: int, layout: dict[str, int]
) -> None:
    """Field cases R104, R105, R108: dealt to 2 ranks under FSDP, and to 2 replicas of 2 ranks that share each row; the
    same numbers on all of the data."""
    own = with_val(config, f"ranks_{ranks}", micro_batch_tokens=micro_batch_tokens)
    run_command(own | {"model": own["model"] | layout}, ranks)
    assert_same(result(own), one_rank)
