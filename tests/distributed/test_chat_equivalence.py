"""Whole runs on chats through the real command: ranks, micro-batches, threads, processes that tokenise and restarts
change nothing but the last bits."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

CHATS = """
max_steps = "None"

[val]
interval = 6
eval_on_start = true
sets = []

[val.data]
name = "{heldout}"
seq_len = 64
overflow = "split"
micro_batch_size = 2
cache_dir = "{cache}"
cache_workers = 1

[data]
type = "sft"
name = ["{first}", "{second}"]
probabilities = [0.6, 0.4]
seq_len = 64
overflow = "split"
max_epochs = 3
cache_dir = "{cache}"
cache_workers = 1
"""


def _write_chats(path: Path, seed: int, count: int) -> Path:
    """Questions and answers of a few letters to about a row's length."""
    generator = np.random.default_rng(seed)
    lines = []
    for size in np.exp(generator.uniform(1, 4, count)).astype(int).tolist():
        letters = "".join(generator.choice(list("abcdefgh "), size))
        messages = [{"role": "user", "content": letters[: size // 3 + 1]}, {"role": "assistant", "content": letters}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def chats(runner, byte_chat_tokenizer) -> list[str | Path]:
    """Arguments that put chats in the place of the token shards: about 4 steps per epoch."""
    overlay = runner.folder / "chats_overlay.toml"
    names = {
        name: _write_chats(runner.folder / f"{name}.jsonl", seed, count)
        for seed, (name, count) in enumerate({"first": 30, "second": 20, "heldout": 7}.items())
    }
    overlay.write_text(CHATS.format(**names, cache=runner.folder / "chat_cache"))
    return ["@", overlay, "--tokenizer.name", byte_chat_tokenizer]


@pytest.fixture(scope="module")
def chat_reference(runner, chats):
    """Three epochs on one rank, a checkpoint in the middle of the second."""
    return runner.run(runner.config("chat_reference", interval=6), *chats)


def test_the_planned_steps_are_the_executed_ones(chat_reference):
    """Field case R56: steps are known from the rows before the run, and the schedule ends with the last of them."""
    (plan,) = [
        line for line in chat_reference.output.splitlines() if line.startswith("plan: ") and " steps of " in line
    ]
    steps = int(plan.split()[1])
    assert sorted(chat_reference.metrics) == list(range(steps + 1))
    last = chat_reference.metrics[steps]
    assert last["optim/lr"] == 1e-3
    assert 2.7 < last["progress/epoch"] <= 3
    assert 1 < chat_reference.metrics[6]["progress/epoch"] < 2, "or the resumed runs prove less than they say"
    assert last["loss/mean"] < chat_reference.metrics[1]["loss/mean"] - 0.5
    tokens = last["progress/num_tokens"]
    assert tokens == steps * 8 * 64
    assert 0 < last["progress/num_padding_tokens"] < 0.1 * tokens
    assert 0.3 * tokens < last["progress/num_loss_tokens"] < 0.9 * tokens
    assert ") split" in chat_reference.output


def test_resume_is_bit_equal(runner, chats, chat_reference):
    """From the middle of epoch 2, the rows filled by the training thread, the chats tokenised anew by two processes."""
    options = [
        "--data.num-workers",
        "0",
        "--data.cache-workers",
        "2",
        "--data.cache-dir",
        runner.folder / "other_cache",
    ]
    resume = ["--resume.dir", chat_reference.dir, "--resume.step", "6"]
    resumed = runner.run(runner.config("chat_resumed", interval=6), *chats, *options, *resume)
    exact = ("loss/mean", "optim/grad_norm", "val/loss", "digest/rows", "digest/params", "progress/num_loss_tokens")
    for name in exact:
        column = resumed.column(name)
        assert column and column == chat_reference.column(name)[-len(column) :]
    steps = max(chat_reference.metrics)
    ours, theirs = resumed.tensors(steps), chat_reference.tensors(steps)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_two_ranks_and_another_micro_batch(runner, chats, chat_reference):
    """Field cases R104, R105: seven held-out conversations have the same loss on 2 ranks, one row at a time."""
    options = ["--data.micro-batch-size", "4", "--val.data.micro-batch-size", "1", "--val.data.packing", "none"]
    other = runner.run(runner.config("chat_ranks_2", interval=6), *chats, *options, ranks=2)
    assert other.column("digest/rows") == chat_reference.column("digest/rows")
    assert other.column("progress/num_loss_tokens") == chat_reference.column("progress/num_loss_tokens")
    assert other.column("loss/mean")[:6] == pytest.approx(chat_reference.column("loss/mean")[:6], rel=1e-6)
    _assert_close_weights(other.tensors(6), chat_reference.tensors(6), 1e-5)
    for step, limit in ((0, 1e-6), (6, 1e-5)):
        assert other.metrics[step]["val/loss"] == pytest.approx(chat_reference.metrics[step]["val/loss"], rel=limit)


def test_resume_on_four_ranks(runner, chats, chat_reference):
    resume = ["--resume.dir", chat_reference.dir, "--resume.step", "6"]
    other = runner.run(runner.config("chat_ranks_4", interval=6), *chats, *resume, ranks=4)
    assert other.column("digest/rows") == chat_reference.column("digest/rows")[6:]
    assert other.column("loss/mean")[:5] == pytest.approx(chat_reference.column("loss/mean")[6:11], rel=1e-5)
    assert other.metrics[12]["val/loss"] == pytest.approx(chat_reference.metrics[12]["val/loss"], rel=1e-4)
    steps = max(chat_reference.metrics)
    _assert_close_weights(other.tensors(steps), chat_reference.tensors(steps), 1e-4)


def _assert_close_weights(a, b, limit):
    """Norm-wise, each weight tensor."""
    names = [name for name in a if name.startswith("model.")]
    assert names and set(names) <= b.keys()
    assert max(((a[name] - b[name]).norm() / b[name].norm()).item() for name in names) < limit
