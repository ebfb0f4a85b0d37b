"""`val.context = "prefix"` against lm-evaluation-harness itself (HFLM, its tasks, its metrics), on a model of ours in
Hugging Face's format and on SmolLM2-135M-Instruct."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.sft import SFTConfig
from trainer.evaluate import evaluate
from trainer.run import Run, StopSignal
from trainer.tokenizer import load_tokenizer
from trainer.train import Trainer

ENGLISH = ("the dog", "a cat,", "and", "ran", "over", "the hill.", "Yes", "x = 1", "it was", "again")
OTHER = ("東京", "🐕", "naïve", "\n\n")


def documents(count: int, most: int) -> list[dict[str, Any]]:
    """From two tokens to several windows; some begin or end with spaces."""
    generator = np.random.default_rng(0)
    sizes = np.exp(generator.uniform(0, np.log(most), count)).astype(int)
    return [{"text": " ".join(generator.choice(ENGLISH + OTHER, size)) + " ." * (size % 2)} for size in sizes]


def questions(count: int, words: tuple[str, ...]) -> list[dict[str, Any]]:
    """Options of several lengths, each with its own space; every fourth context ends with one."""
    generator = np.random.default_rng(1)
    rows = []
    for number in range(count):
        context = " ".join(generator.choice(words, generator.integers(1, 12))) + " " * (number % 4 == 3)
        size = int(generator.integers(2, 5))
        options = [f" {' '.join(generator.choice(words, generator.integers(1, 4)))}" for _ in range(size)]
        rows.append({"context": context, "choices": options, "answer": int(generator.integers(size))})
    return rows


def lm_eval_results(
    folder: Path, rows: dict[str, list[dict[str, Any]]], *, seq_len: int, **options: Any
) -> dict[str, dict[str, float]]:
    """Metrics of lm-eval by set. A set with `text` is scored by rolling windows, one with `choices` as such."""
    pytest.importorskip("lm_eval", reason="the group peers (lm_eval) is not installed")
    from datasets import Dataset
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    peer = HFLM(pretrained=model, tokenizer=tokenizer, max_length=seq_len, batch_size=16, **options)
    rolling = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    }
    choosing = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes")],
    }
    tasks = []
    for name, table in rows.items():
        config = {"task": name, "test_split": "test", "num_fewshot": 0}
        config |= {"custom_dataset": lambda table=table, **_: {"test": Dataset.from_list(table)}}
        tasks.append(ConfigurableTask(config=config | (rolling if "text" in table[0] else choosing)))
    # Its own tasks would be read, 14,000 files.
    manager = TaskManager(include_defaults=False)
    found = simple_evaluate(model=peer, tasks=tasks, task_manager=manager, bootstrap_iters=0, log_samples=False)
    assert found is not None
    return {
        name: {metric.removesuffix(",none"): value for metric, value in metrics.items()}
        for name, metrics in found["results"].items()
    }


def assert_agreement(ours: dict[str, float], theirs: dict[str, dict[str, float]], seq_len: int) -> None:
    bits = ours[f"val/texts/bpb@{seq_len}"]
    assert bits == pytest.approx(theirs["texts"]["bits_per_byte"], rel=1e-5)
    assert 2**bits == pytest.approx(theirs["texts"]["byte_perplexity"], rel=1e-4)
    for name in ("ascii", "mixed"):
        assert ours[f"val/{name}/acc@{seq_len}"] == pytest.approx(theirs[name]["acc"], abs=1e-9)
        # lm-eval divides by characters in acc_norm; where those are bytes it is ours.
        assert ours[f"val/{name}/acc_norm@{seq_len}"] == pytest.approx(theirs[name]["acc_bytes"], abs=1e-9)
    assert ours[f"val/ascii/acc_norm@{seq_len}"] == pytest.approx(theirs["ascii"]["acc_norm"], abs=1e-9)


Scoring = Callable[[Path, dict[str, Any], int], dict[str, float]]


@pytest.fixture
def score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scoring:
    """What `--max-steps 0` says about the model in a folder, in fp32."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)

    def score(model: Path, sets: dict[str, Any], seq_len: int) -> dict[str, float]:
        entries = []
        for name, rows in sets.items():
            path = tmp_path / f"{name}_{seq_len}.jsonl"
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            entries.append({"name": name, "path": str(path)})
        val = {"sets": entries, "seq_lens": [seq_len], "context": "prefix", "micro_batch_tokens": 4 * seq_len}
        values = {
            "max_steps": 0,
            "model": {"name": str(model), "compute_dtype": "float32"},
            "val": val,
            "output_dir": str(tmp_path),
        }
        run_dir = tmp_path / f"scored_{seq_len}"
        run_dir.mkdir()
        evaluate(SFTConfig.model_validate(values), Run(dir=run_dir, attempt=0, stop=StopSignal()))
        (record,) = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        return {name: value for name, value in record.items() if name.startswith("val/")}

    return score


@pytest.fixture
def exported(tmp_path: Path, tiny_tokenizer: Path, tiny_shards: Path, score: Scoring) -> Path:
    """A model of ours after four steps, as the run exported it."""
    arch = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    arch |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    data = {"type": "tokens", "paths": [str(tiny_shards)], "seq_len": 48, "batch_size": 4, "micro_batch_size": 4}
    values = {
        "max_steps": 4,
        "model": {"arch": arch, "init": {"std": 0.2}, "compute_dtype": "float32"},
        "tokenizer": {"name": str(tiny_tokenizer)},
        "data": data | {"num_workers": 0},
        "optim": {"lr": 1e-2},
        "ckpt": {"weights": True},
        "output_dir": str(tmp_path),
    }
    run_dir = tmp_path / "trained"
    run_dir.mkdir()
    trainer = Trainer(SFTConfig.model_validate(values), Run(dir=run_dir, attempt=0, stop=StopSignal()))
    try:
        trainer.run()
    finally:
        trainer.close()
    return run_dir / "weights" / "step_4"


@pytest.mark.parametrize("seq_len", [32, 64])
def test_an_exported_model_scores_in_lm_eval_as_here(seq_len: int, exported: Path, score: Scoring) -> None:
    """Texts shorter and longer than a window, of exactly two windows and a token more; contexts cut from the left."""
    tokenizer = load_tokenizer(str(exported))
    rows = {"texts": documents(20, 60), "ascii": questions(30, ENGLISH), "mixed": questions(12, ENGLISH + OTHER)}
    lengths = [len(tokenizer.encode(row["text"])) for row in rows["texts"]]
    assert min(lengths) < seq_len and max(lengths) > 2 * seq_len
    long = tokenizer.encode(" ".join(ENGLISH * 30))
    rows["texts"] += [{"text": tokenizer.decode(long[: 2 * seq_len + more])} for more in (0, 1)]
    assert [len(tokenizer.encode(row["text"])) - 2 * seq_len for row in rows["texts"][-2:]] == [0, 1]
    ours = score(exported, rows, seq_len)
    theirs = lm_eval_results(exported, rows, seq_len=seq_len)
    assert_agreement(ours, theirs, seq_len)
    assert 0 < ours[f"val/ascii/acc@{seq_len}"] < 1


@pytest.mark.parametrize("begins", [False, True], ids=["plain", "bos"])
def test_llama_2s_kind_of_tokenizer(begins: bool, sentencepiece_tokenizer: Any, tmp_path: Path, score: Scoring) -> None:
    """A space before every text is no byte of it; a tokenizer that begins texts with BOS does so before contexts, and
    BOS leaves first where a context is cut."""
    from tokenizers.processors import TemplateProcessing
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = copy.deepcopy(sentencepiece_tokenizer)
    if begins:
        backend = tokenizer.backend_tokenizer
        backend.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config.update({"vocab_size": 384, "max_position_embeddings": 64, "initializer_range": 0.2})
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = {"texts": documents(12, 20), "ascii": questions(20, ENGLISH), "mixed": questions(12, ENGLISH + OTHER)}
    ours = score(tmp_path / "model", rows, 32)
    # In its rolling windows lm-eval puts the prefix before the tokenizer's own BOS, and scores that.
    theirs = lm_eval_results(tmp_path / "model", {"texts": rows["texts"]}, seq_len=32, add_bos_token=False)
    del rows["texts"]
    assert_agreement(ours, theirs | lm_eval_results(tmp_path / "model", rows, seq_len=32), 32)


CAPITALS = ("Paris", "Rome", "Tokyo", "Madrid", "Berlin")
COUNTRIES = ("France", "Italy", "Japan", "Spain", "Germany")


def test_smollm2_scores_in_lm_eval_as_here(smollm2_folder: Path, score: Scoring) -> None:
    """A real model on English: most answers are right, and a byte costs about a bit."""
    from pydoc_data.topics import topics

    rows = {"texts": [{"text": topics[name].strip()[:size]} for name, size in (("while", 320), ("pass", 120))]}
    rows["texts"].append({"text": "naïve 東京 🐕"})
    asked = [
        {"context": f"The capital of {country} is", "choices": [f" {name}" for name in CAPITALS], "answer": number}
        for number, country in enumerate(COUNTRIES)
    ]
    rows |= {"ascii": asked, "mixed": [row | {"choices": [*row["choices"], " 東京"]} for row in asked[:2]]}
    ours = score(smollm2_folder, rows, 48)
    theirs = lm_eval_results(smollm2_folder, rows, seq_len=48)
    assert_agreement(ours, theirs, 48)
    assert ours["val/ascii/acc@48"] >= 0.8
    assert 0.5 < ours["val/texts/bpb@48"] < 2
