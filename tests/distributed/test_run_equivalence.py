"""Whole runs through the real command: ranks, threads, micro-batches and restarts change nothing but the last bits."""

import json

import pytest
import torch
from torch import Tensor

from trainer.parallel.checksum import parameter_checksum

COUNTS = [f"progress/num_{counted}" for counted in ("samples", "tokens", "loss_tokens", "padding_tokens")]

AS_OF_20_STEPS = ["--scheduler.decay-steps", "0"]
"""With these, 10 steps are the first 10 of the 20, in whose second half the rate falls."""


def assert_bit_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


def assert_close_weights(a: dict[str, Tensor], b: dict[str, Tensor], limit: float) -> None:
    """Norm-wise, each weight tensor."""
    names = [name for name in a if name.startswith("model.")]
    assert names and set(names) <= b.keys()
    worst = max(((a[name] - b[name]).norm() / b[name].norm()).item() for name in names)
    assert worst < limit


def test_reference_learns_and_reports(reference):
    """Field case R107: tokens, loss tokens and padding are counted apart; here every position carries loss."""
    assert sorted(reference.metrics) == list(range(21))
    losses = reference.column("loss/mean")
    assert losses[-1] < losses[0] - 0.5
    last = reference.metrics[20]
    assert last["progress/num_tokens"] == last["progress/num_loss_tokens"] == 20 * 8 * 48
    assert last["progress/num_samples"] == 160 and last["progress/num_padding_tokens"] == 0
    assert last["optim/lr"] == 1e-3 and reference.metrics[1]["optim/lr"] == pytest.approx(1e-2 / 3)
    assert reference.metrics[0]["params/num_params"] > 0
    weights = {name: value for name, value in reference.tensors(20).items() if name.startswith("model.")}
    low, high = parameter_checksum(weights)
    assert last["digest/params"] == f"{int(high):08x}{int(low):08x}"
    assert [step for step, record in reference.metrics.items() if "digest/params" in record] == [5, 10, 15, 20]
    assert all(f"val/held/{name}@{length}" in last for name in ("loss", "perplexity", "bpb") for length in (32, 64))


def test_resume_is_bit_equal(runner, reference):
    """Field cases R57, R59, R60: from the checkpoint in the middle, in the training thread instead of threads."""
    config = runner.config("resumed")
    resumed = runner.run(config, "--resume.dir", reference.dir, "--resume.step", "10", "--data.num-workers", "0")
    assert sorted(resumed.metrics) == list(range(11, 21))
    exact = ("loss/mean", "optim/grad_norm", "optim/lr", "progress/num_tokens", "val/held/bpb@64")
    for name in (*exact, "digest/rows", "digest/params"):
        assert resumed.column(name)
        assert resumed.column(name) == reference.column(name)[-len(resumed.column(name)) :]
    assert_bit_equal(resumed.tensors(20), reference.tensors(20))


def assert_same_ten_steps(other, reference):
    """Loss 1e-6, weights after 10 steps 1e-5, held-out bpb 1e-6; rows and counts are the same."""
    for name in ("digest/rows", *COUNTS):
        assert other.column(name)[:10] == reference.column(name)[:10], name
    assert other.column("loss/mean")[:10] == pytest.approx(reference.column("loss/mean")[:10], rel=1e-6)
    assert other.column("optim/grad_norm")[:10] == pytest.approx(reference.column("optim/grad_norm")[:10], rel=1e-5)
    assert_close_weights(other.tensors(10), reference.tensors(10), 1e-5)
    for length in (32, 64):
        name = f"val/held/bpb@{length}"
        assert other.metrics[10][name] == pytest.approx(reference.metrics[10][name], rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "options", "workers"),
    [
        (2, ["--model.defer-grad-sync"], "2 workers"),
        (
            4,
            [
                *("--model.dp-replicate", "2", "--model.defer-replicate-sync", "--model.ac.mode", "full"),
                *("--no-model.reshard-after-forward", "--data.micro-batch-size", "1"),
            ],
            "4 workers (2 replicas x 2 shards)",
        ),
    ],
)
def test_other_numbers_of_ranks(runner, reference, ranks, options, workers):
    """Field cases R13, R62, R104: FSDP, and replicas of it."""
    other = runner.run(runner.config(f"ranks_{ranks}", steps=10), *options, *AS_OF_20_STEPS, ranks=ranks)
    assert f"plan: {workers}, 2 micro-batches per worker and step" in other.output
    assert_same_ten_steps(other, reference)


def test_shared_rows_then_one_rank(runner, reference):
    """Field cases R62, R108: two replicas of two ranks that share each row; then one rank goes on with theirs."""
    options = ["--model.dp-replicate", "2", "--model.cp", "2", "--model.cp-style", "ring"]
    other = runner.run(runner.config("shared", steps=10), *options, *AS_OF_20_STEPS, ranks=4)
    assert "plan: 4 workers (2 replicas x 2 shares of a row), 2 micro-batches per worker and step" in other.output
    assert_same_ten_steps(other, reference)
    resumed = runner.run(runner.config("shared_no_more"), "--resume.dir", other.dir)
    assert resumed.column("digest/rows") == reference.column("digest/rows")[10:]
    assert resumed.column("loss/mean") == pytest.approx(reference.column("loss/mean")[10:], rel=1e-5)
    assert_close_weights(resumed.tensors(20), reference.tensors(20), 1e-4)


def test_resume_on_other_ranks_and_micro_batches(runner, reference):
    """Field cases R62, R108: the same rows, and weights to the tolerance of fp32, on two ranks that share them."""
    config = runner.config("resumed_on_2")
    resumed = runner.run(
        config,
        *("--resume.dir", reference.dir, "--resume.step", "10"),
        *("--data.micro-batch-size", "4", "--val.micro-batch-tokens", "64", "--model.ac.mode", "selective"),
        *("--model.cp", "2"),
        ranks=2,
    )
    for name in ("digest/rows", *COUNTS):
        assert resumed.column(name) == reference.column(name)[10:], name
    assert resumed.column("loss/mean") == pytest.approx(reference.column("loss/mean")[10:], rel=1e-5)
    assert_close_weights(resumed.tensors(20), reference.tensors(20), 1e-4)
    assert resumed.metrics[20]["val/held/bpb@32"] == pytest.approx(reference.metrics[20]["val/held/bpb@32"], rel=1e-5)


def test_bad_resume_steps(runner, reference):
    """Field case R72: a step that is not there is an error that lists those that are, before anything is spawned."""
    config = runner.config("nowhere")
    done = runner.run(config, "--resume.dir", reference.dir, "--resume.step", "13", check=False)
    assert done.returncode == 2
    assert (
        "resume.step" in done.output and "there are step_10, step_20" in done.output and "Traceback" not in done.output
    )


def test_used_run_dir_is_refused(runner, reference):
    done = runner.run(reference.config, check=False)
    assert done.returncode == 2
    assert "--clean" in done.output and "Traceback" not in done.output
    assert sorted(reference.metrics) == list(range(21))


def test_resolved_config_starts_the_same_run(runner, reference):
    resolved = reference.dir / "configs" / "sft.json"
    assert json.loads(resolved.read_text())["resume"] is None
    done = runner.run(resolved, "--run.name", "from_json", "--dry-run")
    assert "20 steps" in done.output
