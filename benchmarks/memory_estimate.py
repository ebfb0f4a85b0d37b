"""The estimate of a GPU's peak memory against what trainings really take, with and without the levers that lower it.

    benchmarks/gpu.sh python benchmarks/memory_estimate.py --out benchmarks/results/h200_memory.json
    benchmarks/gpu.sh python benchmarks/memory_estimate.py --runs 125m_eager 1b_offload

Trains each of RUNS for a few steps through the real command on one GPU, in a process of its own, and holds the peak
that its metrics record (`perf/peak_memory`) against the estimate that `--dry-run` prints. The weights are constants
(`model.debug.random_init`): they change no size, and drawing them would take most of the time. Prints one line per run
and ratios at the end; exit code 1 when one is off by more than --tolerance.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from throughput import COMMAND, SHAPES

from configs.sft import SFTConfig
from trainer.memory import RankShape, estimate_memory
from trainer.preflight import plan_run, prepare
from trainer.preflight.checks import check_model

FULL, SELECTIVE = {"ac": {"mode": "full"}}, {"ac": {"mode": "selective"}}
COMPILE: dict[str, Any] = {"compile": {}}

RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # shape, [model], [data]: seq_len, rows per micro-batch, micro-batches, packed documents
    "1b": ("1b", COMPILE, {"seq_len": 8192, "rows": 4, "accum": 1, "length": "fixed"}),
    "1b_full": ("1b", COMPILE | FULL, {"seq_len": 8192, "rows": 4, "accum": 2, "length": "variable"}),
    "3b_optim_offload": (
        "3b",
        COMPILE | FULL | {"optim_cpu_offload": True},
        {"seq_len": 8192, "rows": 2, "accum": 2, "length": "variable"},
    ),
    "125m_eager": ("125m", {}, {"seq_len": 2048, "rows": 32, "accum": 2, "length": "variable"}),
    "1b_selective": ("1b", COMPILE | SELECTIVE, {"seq_len": 8192, "rows": 4, "accum": 1, "length": "variable"}),
    "1b_long": ("1b", COMPILE | FULL, {"seq_len": 65536, "rows": 2, "accum": 1, "length": "variable"}),
    "1b_long_offload": (
        "1b",
        COMPILE | FULL | {"ac_offloading": {}},
        {"seq_len": 65536, "rows": 2, "accum": 1, "length": "variable"},
    ),
    "1b_eager_offload": (
        "1b",
        {"ac_offloading": {}},
        {"seq_len": 8192, "rows": 2, "accum": 1, "length": "variable"},
    ),
    "1b_optim_offload": (
        "1b",
        COMPILE | FULL | {"optim_cpu_offload": True},
        {"seq_len": 8192, "rows": 4, "accum": 2, "length": "variable"},
    ),
    "1b_bf16": (
        "1b",
        COMPILE | FULL | {"optimization_dtype": "bfloat16"},
        {"seq_len": 8192, "rows": 4, "accum": 2, "length": "variable"},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", choices=RUNS, nargs="+", default=list(RUNS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=570, help="no further run is started after so long")
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--out", type=Path, help="JSON file for the result; runs that it has already are kept")
    args = parser.parse_args()

    start = time.monotonic()
    results: dict[str, Any] = {}
    if args.out is not None and args.out.exists():
        results = json.loads(args.out.read_text())["runs"]
    for name in args.runs:
        if time.monotonic() - start > args.seconds:
            print(f"left out for want of time: {name}", flush=True)
            continue
        results[name] = measure(name, args.steps)
        print(json.dumps({name: results[name]}), flush=True)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(summary(results), indent=1) + "\n")
    print("estimate / measured:", {name: result.get("ratio") for name, result in results.items()})
    if any(abs(result.get("ratio", 9.0) - 1) > args.tolerance for result in results.values()):
        sys.exit(1)


def summary(results: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "runs": results,
    }


def measure(name: str, steps: int) -> dict[str, Any]:
    """One run: the estimate, then the training in a process of its own."""
    shape, model, data = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(shape, model, data, steps, folder)
        estimate = estimate_of(config)
        path = Path(folder) / "run.json"
        path.write_text(config.model_dump_json())
        done = subprocess.run([*COMMAND, "@", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            return {"failed": done.stdout[-2000:], "parts_gib": estimate["parts_gib"]}
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["step"]]
    measured = max(record["perf/peak_memory"] for record in records)
    return {
        "shape": shape,
        "model": model,
        "data": data,
        "measured_gib": round(measured, 3),
        "estimated_gib": round(estimate["total"] / 2**30, 3),
        "ratio": round(estimate["total"] / 2**30 / measured, 4),
        "moment": estimate["moment"],
        "parts_gib": estimate["parts_gib"],
        "peak_by_step_gib": [round(record["perf/peak_memory"], 3) for record in records],
        "seconds_per_step": round(statistics.median(record["time/step"] for record in records[2:]), 4),
        "tokens_per_second": round(statistics.median(record["perf/throughput"] for record in records[2:])),
    }


def run_config(shape: str, model: dict[str, Any], data: dict[str, Any], steps: int, folder: str) -> SFTConfig:
    return SFTConfig.model_validate(
        {
            "model": {"arch": SHAPES[shape], "debug": {"random_init": True}} | model,
            "data": {
                "type": "fake",
                "input_ids": "random",
                "length": data["length"],
                "seq_len": data["seq_len"],
                "micro_batch_size": data["rows"],
                "batch_size": data["rows"] * data["accum"],
            },
            "max_steps": steps,
            "deployment": {"type": "single_node", "num_train_gpus": 1},
            "output_dir": folder,
            "run": {"name": "run"},
        }
    )


def estimate_of(config: SFTConfig) -> dict[str, Any]:
    """As `--dry-run` makes it."""
    inputs = prepare(config)
    plan = plan_run(config, inputs.source, 1)
    shape = RankShape(
        rows=config.data.micro_batch_size, seq_len=config.data.seq_len, grad_accum_steps=plan.grad_accum_steps
    )
    estimate = estimate_memory(config.model, check_model(config, inputs), shape)
    parts = {name: round(size / 2**30, 3) for name, size in estimate.parts.items()}
    return {"total": estimate.total, "moment": estimate.moment, "parts_gib": parts}


if __name__ == "__main__":
    main()
