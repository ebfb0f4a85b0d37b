"""What a run survives, and how it ends when it cannot."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
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


@pytest.fixture
def start(runner):
    """`runner.popen`, whose process does not outlive a test that fails."""
    started = []

    def popen(*arguments: str | Path) -> subprocess.Popen:
        started.append(runner.popen(*arguments))
        return started[-1]

    yield popen
    for process in started:
        process.kill()  # its workers die with it
        process.communicate()


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


@pytest.mark.parametrize("seed", [1, 2])
def test_kill_9_loses_nothing(runner, undisturbed, seed):
    """Field case R66: at random moments in training and in saving; the final weights are bit-equal."""
    kill_and_resume(runner, undisturbed, f"killed_{seed}", seed)


@pytest.mark.skipif("ONELOOP_SLOW" not in os.environ, reason="slow: set ONELOOP_SLOW=1")
@pytest.mark.parametrize("seed", range(10, 30))
def test_kill_9_twenty_times(runner, undisturbed, seed):
    kill_and_resume(runner, undisturbed, f"killed_{seed}", seed)


def rank_pid(process, rank: int) -> int:
    """Process id of a worker."""
    children = [path.read_text().split() for path in Path(f"/proc/{process.pid}/task").glob("*/children")]
    marks = {int(pid): Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pids in children for pid in pids}
    return next(pid for pid, mark in marks.items() if f"RANK={rank}".encode() in mark)


def log_of(run_dir: Path, rank: int) -> str:
    path = run_dir / "logs" / "latest" / f"rank_{rank}.log"
    return path.read_text() if path.exists() else ""


def last_step(run_dir: Path) -> int:
    return max(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*"))


def test_signals_in_a_validation_and_a_step_stop_all_ranks_and_lose_nothing(runner, start):
    """Field case R114, on two ranks: SIGUSR1 to rank 1 alone within a validation, SIGTERM to the command in a step and
    once all is done. Each time all ranks end after the same step, its checkpoint is there, the command says so and
    exits with 0; the resumed run makes the validation up and ends with the very weights of one never stopped."""
    config = runner.config("signals", steps=40, interval=2)
    run_dir, two = runner.folder / "signals", ["--deployment.num-train-gpus", "2"]
    resume = runner.folder / "resume_signals.toml"
    resume.write_text("[resume]\n")

    def end(process) -> str:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        return output

    def stopped(process) -> int:
        """Ends the attempt; gives the step it stopped after."""
        output, step = end(process), last_step(run_dir)
        said = f"stopped on request after step {step} of 40: checkpoint at step {step} is written"
        assert said in output and all(said in log_of(run_dir, rank) for rank in (0, 1))
        return step

    long_round = ["--val.seq-lens", "4", "8", "--val.micro-batch-tokens", "8"]
    process = start("@", config, *two, *long_round)
    wait_for(lambda: (run_dir / "checkpoints" / "step_2").exists(), process)
    os.kill(rank_pid(process, 1), signal.SIGUSR1)
    assert stopped(process) == 2
    assert "the validation of step 2 is left to the resumed run" in log_of(run_dir, 1)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2] and "time/val" not in records[2]

    process = start("@", config, "@", resume, *two, "--val.interval", "2")
    wait_for(lambda: count_steps(run_dir) > 5, process)
    process.send_signal(signal.SIGTERM)
    assert 4 <= stopped(process) < 40

    process = start("@", config, "@", resume, *two, "--no-val")
    wait_for(lambda: "done: 40 steps" in log_of(run_dir, 0), process)
    with suppress(ProcessLookupError, StopIteration, FileNotFoundError):
        os.kill(rank_pid(process, 1), signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert "done: 40 steps" in end(process)

    plain = runner.run(runner.config("no_signals", steps=40, interval=50), "--no-val", ranks=2)
    done = replace(plain, dir=run_dir)
    assert done.metrics[2]["val/held/bpb@32"] > 0
    assert done.column("step") == list(range(1, 41))
    assert done.column("digest/rows") == plain.column("digest/rows")
    ours, theirs = done.tensors(40), plain.tensors(40)
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []


def test_a_killed_rank_ends_the_run_and_a_living_run_keeps_others_out(runner, start):
    """As the kernel does when memory runs out: the others end soon, the rank that died is named last, no process and
    no lock is left. While the run lives, a second one in its directory is refused and says who has it."""
    config = runner.config("killed_rank", steps=100_000, interval=50)
    run_dir = runner.folder / "killed_rank"
    process = start("@", config, "--deployment.num-train-gpus", "2", "--no-val")
    wait_for(lambda: count_steps(run_dir) > 3, process)
    second = runner.run(config, "--clean", ranks=2, check=False)
    assert second.returncode == 2
    assert f"killed_rank is in use by a run that has not ended (process {process.pid} on " in second.output

    pids = [rank_pid(process, rank) for rank in (0, 1)]
    os.kill(pids[1], signal.SIGKILL)
    killed = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and time.monotonic() - killed < 60
    assert "rank 1 died of SIGKILL (the kernel sends it when memory runs out); the end of its log" in output
    assert output.rpartition("rank 1 died of SIGKILL")[2].count("Traceback") == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    with (run_dir / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounting a small disk takes root")
def test_a_disk_that_fills_up(runner, start, undisturbed, tmp_path):
    """Field case R67: full of somebody else's data while a run on two ranks goes on. The command ends with the reason
    and no traceback, from whichever rank it comes, and the checkpoint before is whole."""
    config = runner.config("full", steps=100_000, interval=5)
    disk, run_dir = tmp_path / "disk", tmp_path / "disk" / "full"
    disk.mkdir()
    options = ["--output-dir", disk, "--no-val"]

    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], check=False)
    if mounted.returncode:
        pytest.skip("this machine mounts nothing")
    try:
        process = start("@", config, *options, "--deployment.num-train-gpus", "2", "--ckpt.keep-last", "1")
        wait_for(lambda: (run_dir / "checkpoints" / "step_5").exists(), process)
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(1 << 16))
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1 and "Traceback" not in output, output
        last = output.splitlines()[-1]
        assert "No space left on device" in last or "not enough disk space" in last, output
        tensors = replace(undisturbed, dir=run_dir).tensors(last_step(run_dir))
        assert all(tensor.isfinite().all() for tensor in tensors.values())
    finally:
        subprocess.run(["umount", disk], check=True)


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
