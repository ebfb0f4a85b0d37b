"""Random faults against a run that is started again after each: does it end as if nothing had happened?

    python benchmarks/chaos.py --faults 100 --seed 1 --out benchmarks/results/chaos.json

Trains a tiny model for 200 steps on two ranks, with asynchronous checkpoints and `resume.auto`: by `sft` on this
machine, and as a job on two nodes (the script that `[slurm]` makes, with the programs of tests/fake_slurm). Each run
suffers some faults, each followed by a new start, and is then let go to its end. After every fault: did all end in
time, with the right exit code, is no process left? At the end: are all tensors of the last checkpoint, the row digests
and the steps in metrics.jsonl those of a run that was left in peace? Exit code 1 if anything was not.

A full disk needs a small tmpfs, and mounting one needs root; without, that fault is left out.
"""

import argparse
import datetime
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from chaos_attempt import Attempt
from chaos_faults import (
    LOCAL,
    MOMENTS,
    NODES,
    Fault,
    damage,
    draw_faults,
    expected_codes,
    strike,
    wait_for_moment,
    wait_gone,
)
from torch import Tensor

from trainer.checkpoint import Checkpointer
from trainer.checkpoint.safe_reader import read_metadata
from trainer.parallel.mesh import one_rank_mesh
from trainer.run_dir import JOB_RECORD

ROOT = Path(__file__).parents[1]
SFT = (sys.executable, "-c", "import sys; from trainer.sft import run_sft; sys.exit(run_sft(sys.argv[1:]))")
FAKE_SLURM = ROOT / "tests" / "fake_slurm"

KINDS = tuple(dict.fromkeys((*LOCAL, *NODES)))

END_SECONDS = 60.0
"""No fault may take longer to end."""

MOMENT_SECONDS = 240.0
DISK_MEGABYTES = 48

START = """
max_steps = {steps}
output_dir = "{output_dir}"

[run]
name = "{name}"

[model]
compute_dtype = "float32"
init = {{ std = 0.1, seed = 5 }}

[model.arch]
model_type = "llama"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
vocab_size = 64
max_position_embeddings = 64
tie_word_embeddings = true

[data]
type = "fake"
input_ids = "random"
seq_len = 32
batch_size = 4
micro_batch_size = 1

[optim]
lr = 1e-2

[ckpt]
interval = {interval}
keep_last = 3

[resume]
auto = true

[deployment]
{deployment}
timeout_seconds = 15
"""
LOCAL_RANKS = "num_train_gpus = 2"
NODE_RANKS = 'type = "multi_node"\nnum_nodes = 2\ngpus_per_node = 1'


@dataclass(kw_only=True)
class Record:
    """One fault and what came of it."""

    way: str
    run: int
    fault: Fault
    struck_at_step: int = -1
    seconds_to_end: float | None = None
    exit_code: int | None = None
    left: list[str] = field(default_factory=list)
    damaged: str = ""
    wrong: str = ""


class Campaign:
    """Runs, one after the other, and the records of their faults."""

    def __init__(
        self,
        folder: Path,
        logs: Path,
        *,
        seed: int,
        steps: int,
        interval: int,
        kinds: Sequence[str],
        moments: Sequence[str],
    ) -> None:
        """
        Args:
            folder: for run directories; may be a small disk.
            logs: for the output of commands, elsewhere: a full disk is to be the runs' trouble alone.
            seed: of the faults.
            steps: of each run.
            interval: steps between checkpoints.
            kinds: of faults.
            moments: of faults.
        """
        self.folder, self._logs = folder, logs
        self.records: list[Record] = []
        self.endings: list[str] = []
        self._rng = random.Random(seed)
        self._steps, self._interval, self._kinds, self._moments = steps, interval, kinds, moments
        self._name = uuid.uuid4().hex[:8]
        self._starts = 0
        run_dir = self._lay_out("undisturbed", LOCAL_RANKS)
        attempt = self._start("local", "undisturbed", {})
        if not self._ends_well(attempt):
            raise SystemExit(f"the undisturbed run failed:\n{attempt.tail()}")
        self._tensors = load_tensors(run_dir / "checkpoints" / f"step_{steps}")
        self._digests = digests(run_dir)

    def run(self, way: str, num_faults: int) -> None:
        """One run with so many faults at most, to its end."""
        number = len(self.endings)
        name = f"{way}_{number}"
        kinds = tuple(kind for kind in (LOCAL if way == "local" else NODES) if kind in self._kinds)
        run_dir = self._lay_out(name, LOCAL_RANKS if way == "local" else NODE_RANKS)
        env = {} if way == "local" else self._submit(name)
        for fault in draw_faults(self._rng, kinds, num_faults, total_steps=self._steps, moments=self._moments):
            attempt = self._start(way, name, env)
            record = Record(way=way, run=number, fault=fault)
            try:
                self._suffer(attempt, record)
            finally:
                attempt.kill()
            self.records.append(record)
            self._say(record)
            record.damaged = damage(fault, run_dir)
            if record.wrong:
                break
        attempt = self._start(way, name, env)
        ending = self._compare(run_dir) if self._ends_well(attempt) else f"not done in peace:\n{attempt.tail()}"
        self.endings.append(ending)
        print(f"{name}: {ending or 'equal to the undisturbed run'}", flush=True)
        if not ending:
            shutil.rmtree(run_dir)

    def _ends_well(self, attempt: Attempt) -> bool:
        """Let it run to its end."""
        try:
            return attempt.wait_gone(MOMENT_SECONDS) is not None and attempt.exit_code == 0
        finally:
            attempt.kill()

    def _suffer(self, attempt: Attempt, record: Record) -> None:
        fault = record.fault
        if not wait_for_moment(fault, attempt, MOMENT_SECONDS):
            record.wrong = f"the run ended before the fault, or did not get to it:\n{attempt.tail()}"
            return
        record.struck_at_step = attempt.last_step()
        strike(fault, attempt)
        record.seconds_to_end = wait_gone(fault, attempt, self.folder, END_SECONDS)
        record.exit_code = attempt.exit_code
        if record.seconds_to_end is None:
            record.left = [f"{process.role} {process.pid}: {process.command}" for process in attempt.processes()]
            record.wrong = f"not ended after {END_SECONDS:g} s:\n{attempt.tail()}"
        elif record.exit_code not in expected_codes(fault):
            record.wrong = f"unexpected exit code:\n{attempt.tail()}"

    def _lay_out(self, name: str, deployment: str) -> Path:
        """Write the config of a run; gives its directory."""
        text = START.format(
            name=name, output_dir=self.folder, steps=self._steps, interval=self._interval, deployment=deployment
        )
        (self.folder / f"{name}.toml").write_text(text)
        return self.folder / name

    def _submit(self, name: str) -> dict[str, str]:
        """Queue a run as a job of the fake cluster; gives the environment in which the cluster runs it."""
        cluster = self.folder / f"{name}_cluster"
        cluster.mkdir()
        path = os.pathsep.join([str(FAKE_SLURM), str(Path(sys.executable).parent), os.environ["PATH"]])
        env = {"PATH": path, "FAKE_SLURM": str(cluster)}
        command = [*SFT, "@", str(self.folder / f"{name}.toml"), "--slurm"]
        done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"the job cannot be submitted:\n{done.stdout}{done.stderr}")
        job_id = json.loads((self.folder / name / JOB_RECORD).read_text())["job_id"]
        return env | {"JOB": job_id}

    def _start(self, way: str, name: str, env: dict[str, str]) -> Attempt:
        self._starts += 1
        command: tuple[str, ...] = (*SFT, "@", str(self.folder / f"{name}.toml"))
        if way == "nodes":
            command = (str(FAKE_SLURM / "run_job"), env["JOB"])
            env = env | {"SLURM_RESTART_COUNT": str(self._starts)}
        mark = f"{self._name}_{self._starts}"
        log = self._logs / f"{self._starts}.log"
        return Attempt(command, name=mark, run_dir=self.folder / name, log=log, env=env)

    def _compare(self, run_dir: Path) -> str:
        """What differs from the undisturbed run; nothing if all is equal."""
        ours = load_tensors(run_dir / "checkpoints" / f"step_{self._steps}")
        differing = [key for key in self._tensors if not torch.equal(ours[key], self._tensors[key])]
        if differing or ours.keys() != self._tensors.keys():
            return f"tensors differ: {differing}"
        found = digests(run_dir)
        if found != self._digests:
            steps = [step for step in self._digests if found.get(step) != self._digests[step]]
            return f"metrics.jsonl: other rows or no record at steps {steps}; has {len(found)} steps"
        return ""

    def _say(self, record: Record) -> None:
        took = "-" if record.seconds_to_end is None else f"{record.seconds_to_end:.1f} s"
        print(
            f"{len(self.records):3d} {record.way} run {record.run}: {record.fault.kind} in {record.fault.moment}, step "
            f"{record.struck_at_step}: ended in {took}, code {record.exit_code} {record.wrong}",
            flush=True,
        )


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, on one rank."""
    entries: dict[str, Any] = read_metadata(path).state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    Checkpointer(path.parents[1], None, one_rank_mesh(torch.device("cpu"))).load(path, tensors)
    return tensors


def digests(run_dir: Path) -> dict[int, str]:
    """Digest of the rows of every step in metrics.jsonl."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["digest/rows"] for record in records if "digest/rows" in record}


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A tmpfs of some megabytes at `folder`, where one can be mounted. Gives whether there is one."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m", "tmpfs", str(folder)]
    is_there = os.geteuid() == 0 and shutil.which("mount") is not None
    is_there = is_there and subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield is_there
    finally:
        if is_there:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def summary(campaign: Campaign, *, seed: int, seconds: float) -> dict:
    """What is kept of a campaign."""
    kinds: dict[str, dict] = {}
    for record in campaign.records:
        kind = kinds.setdefault(f"{record.way}: {record.fault.kind}", {"faults": 0, "longest_seconds_to_end": 0.0})
        kind["faults"] += 1
        longest = max(kind["longest_seconds_to_end"], record.seconds_to_end or END_SECONDS)
        kind["longest_seconds_to_end"] = round(longest, 2)
    moments = [record.fault.moment for record in campaign.records]
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "seed": seed,
        "minutes": round(seconds / 60, 1),
        "faults": len(campaign.records),
        "runs": len(campaign.endings),
        "runs_equal_to_undisturbed": campaign.endings.count(""),
        "longest_seconds_to_end": max((kind["longest_seconds_to_end"] for kind in kinds.values()), default=0.0),
        "faults_that_left_processes": sum(bool(record.left) for record in campaign.records),
        "moments": {moment: moments.count(moment) for moment in sorted(set(moments))},
        "kinds": dict(sorted(kinds.items())),
        "wrong": [asdict(record) for record in campaign.records if record.wrong],
        "unequal": [ending for ending in campaign.endings if ending],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=("local", "nodes"), default=["local", "nodes"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=MOMENTS)
    parser.add_argument("--faults-per-run", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--interval", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # and clear up
    start = time.monotonic()
    folders = tempfile.TemporaryDirectory(prefix="chaos_"), tempfile.TemporaryDirectory(prefix="chaos_logs_")
    with folders[0] as name, folders[1] as logs, small_disk(Path(name)) as has_disk:
        kinds = [kind for kind in args.kinds if kind != "disk full" or has_disk]
        if not has_disk:
            print("no small disk can be mounted here: none will be full", flush=True)
        campaign = Campaign(
            Path(name),
            Path(logs),
            seed=args.seed,
            steps=args.steps,
            interval=args.interval,
            kinds=kinds,
            moments=args.moments,
        )
        while (left := args.faults - len(campaign.records)) > 0:
            campaign.run(args.ways[len(campaign.endings) % len(args.ways)], min(left, args.faults_per_run))
    result = summary(campaign, seed=args.seed, seconds=time.monotonic() - start)
    print(json.dumps(result))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["wrong"] or result["unequal"] else 0


if __name__ == "__main__":
    sys.exit(main())
