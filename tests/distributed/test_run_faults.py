"""What a run survives, and how it ends when it cannot."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.data.digest import format_digest
from trainer.data.loader import RowLoader
from trainer.data.shards import TokenPool
from trainer.data.tokens import TokensSource


def wait_for(condition: Callable[[], bool], process, seconds: float = 120) -> None:
    """Poll until `condition` holds; the process must still run then."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "the run does not get on"
        time.sleep(0.002)


def count_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def is_saving(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob(".step_*.tmp"))


@pytest.fixture(scope="module")
def undisturbed(runner):
    return runner.run(runner.config("undisturbed", steps=60, interval=5))


def kill_and_resume(runner, undisturbed, name: str, seed: int, ranks: int = 1) -> None:
    """Kill -9 the launcher once in training and once in saving, resume each time, and compare the end."""
    rng = random.Random(seed)
    config = runner.config(name, steps=60, interval=5)
    resume = runner.folder / "resume.toml"
    resume.write_text("[resume]\n")
    run_dir = runner.folder / name
    arguments = ["@", config, "--deployment.num-train-gpus", str(ranks), "--no-val"]
    last_steps = rng.randint(8, 20), rng.randint(25, 45)
    for in_saving, last_step in zip((rng.random() < 0.5, True), last_steps, strict=True):
        process = runner.popen(*arguments)
        if in_saving:
            wait_for(lambda last_step=last_step: count_steps(run_dir) > last_step and is_saving(run_dir), process)
        else:
            wait_for(lambda last_step=last_step: count_steps(run_dir) > last_step, process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        arguments = ["@", config, "@", resume, "--deployment.num-train-gpus", str(ranks), "--no-val"]
    done = runner.run(config, "@", resume, "--no-val", ranks=ranks)
    assert done.column("step") == list(range(1, 61))
    assert done.column("digest/rows") == undisturbed.column("digest/rows")
    ours, theirs = done.tensors(60), undisturbed.tensors(60)
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kill_9_loses_nothing(runner, undisturbed, seed):
    """Field case R66: at random moments in training and in saving; the final weights are bit-equal."""
    kill_and_resume(runner, undisturbed, f"killed_{seed}", seed)


@pytest.mark.skipif("ONELOOP_SLOW" not in os.environ, reason="slow: set ONELOOP_SLOW=1")
@pytest.mark.parametrize("seed", range(10, 30))
def test_kill_9_twenty_times(runner, undisturbed, seed):
    kill_and_resume(runner, undisturbed, f"killed_{seed}", seed)


def test_sigterm_writes_a_checkpoint_and_the_run_goes_on(runner, undisturbed):
    """Field case R114: both ranks agree on the step, the exit is clean and says so, and nothing is lost."""
    config = runner.config("terminated", steps=60, interval=50)
    process = runner.popen("@", config, "--deployment.num-train-gpus", "2", "--no-val")
    wait_for(lambda: count_steps(runner.folder / "terminated") > 5, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "stopped on request after step" in output
    resume = runner.folder / "resume_terminated.toml"
    resume.write_text("[resume]\n")
    done = runner.run(config, "@", resume, "--no-val", ranks=2)
    assert done.column("digest/rows") == undisturbed.column("digest/rows")
    assert done.column("loss/mean")[:10] == pytest.approx(undisturbed.column("loss/mean")[:10], rel=1e-6)


def test_diverged_run_goes_back_once_and_then_fails(runner):
    """Field case R94: steps that are not finite are skipped and counted; too many in a row end the run with exit 1."""
    config = runner.config("diverged", steps=40, interval=2)
    options = ["--optim.lr", "1e30", "--optim.max-norm", "None", "--nan-guard.max-consecutive", "3", "--no-val"]
    done = runner.run(config, *options, ranks=2, check=False)
    assert done.returncode == 1
    assert "back to step_" in done.output and "were all skipped" in done.output.splitlines()[-1]
    assert "Traceback" not in done.output
    last = done.metrics[max(done.metrics)]
    assert last["optim/skipped_steps"] == 6


def copy_shards(source: Path, folder: Path) -> list[Path]:
    """A copy that a test may change; gives its shards in order."""
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return sorted(folder.glob("*.ds"))


def test_ids_beyond_the_vocabulary_end_the_run_with_the_file(runner, tiny_shards, tmp_path):
    """Field case R47: caught on the CPU when the row is read, with shard and offset; exit 1, no traceback."""
    first = copy_shards(tiny_shards, tmp_path)[0]
    tokens = np.fromfile(first, "<u2")
    tokens[1000] = 384  # the model has as many embeddings
    tokens.tofile(first)
    options = ["--data.paths", tmp_path, "--no-data.shuffle", "--no-val"]
    done = runner.run(runner.config("small_vocabulary"), *options, ranks=2, check=False)
    assert done.returncode == 1 and "Traceback" not in done.output
    assert f"{first}: token 1000 has id 384, but the model has only 384 embeddings" in done.output
    assert max(done.metrics) <= 2  # token 1000 is read in the third step of 384 tokens


def test_rows_without_loss_are_passed_over(runner, tiny_shards, tmp_path):
    """Field cases R15, R18, R94, on two ranks: the shards say that no token of three steps counts. Those steps change
    nothing, the run goes back to its last checkpoint and leaves out exactly their rows."""
    shards, tokens_per_step, bad = copy_shards(tiny_shards, tmp_path), 8 * 48, (6, 9)
    start = 0
    for path in shards:
        size = path.stat().st_size // 2
        counts = np.ones(size, np.uint8)
        counts[max(bad[0] * tokens_per_step + 1 - start, 0) : max(bad[1] * tokens_per_step + 1 - start, 0)] = 0
        counts.tofile(f"{path}.loss")
        start += size
    config = runner.config("no_loss", steps=12, interval=5)
    options = ["--data.paths", tmp_path, "--no-data.shuffle", "--no-val", "--nan-guard.max-consecutive", "3"]
    done = runner.run(config, *options, ranks=2)
    assert "steps 7 to 9 were all skipped" in done.output and "back to step_5" in done.output
    assert done.column("step") == list(range(1, 13))
    source = TokensSource(
        TokenPool([tmp_path]),
        seq_len=48,
        vocab_size=384,
        seed=7,
        shuffle=False,
        document_masking=True,
        tokenizer={},
    )
    loader = RowLoader(source, batch_size=8, micro_batch_size=8, dp_rank=0, dp_size=1, num_workers=0, pin_memory=False)
    blocks = [*range(6), *range(9, 15)]
    assert done.column("digest/rows") == [format_digest(loader.step(block).digest) for block in blocks]
    assert done.column("optim/skipped_steps") == [0] * 5 + [3] * 7
    assert done.column("loss/nan_count") == [0] * 12
    assert done.column("progress/num_loss_tokens")[-1] == 12 * tokens_per_step
    tensors = done.tensors(12)
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert {tensor.item() for name, tensor in tensors.items() if name.startswith("optimizer.step.")} == {12.0}


def test_the_data_runs_out_on_all_ranks_at_once(runner, tiny_shards):
    """Field case R54: what is left of the last pass fills no step; every rank ends after the same one and says so."""
    config = runner.config("exhausted", interval=50)
    options = ["--max-steps", "None", "--data.max-epochs", "1", "--data.batch-size", "16", "--no-val"]
    done = runner.run(config, *options, ranks=2)
    tokens = sum(path.stat().st_size // 2 for path in tiny_shards.glob("*.ds"))
    steps, left = divmod(tokens // 48, 16)
    assert steps > 1 and left
    assert f"plan: {steps} steps of 16 rows" in done.output and f"epochs of {tokens // 48} rows" in done.output
    assert done.column("step") == list(range(1, steps + 1))
    logs = [(done.dir / "logs" / "latest" / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert all(f"done: {steps} steps" in text for text in logs)


def test_missing_shard_index(runner, tiny_shards, tmp_path):
    first = copy_shards(tiny_shards, tmp_path)[0]
    first.with_name(f"{first.name}.index").unlink()
    done = runner.run(runner.config("no_index"), "--data.paths", tmp_path, check=False)
    assert done.returncode == 2
    assert "data.paths" in done.output and ".ds.index" in done.output and "Traceback" not in done.output
    assert not (runner.folder / "no_index" / "metrics.jsonl").exists()
