"""Run directories as `sft` leaves them, made by hand: a config and metrics."""

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

CONFIG: dict[str, Any] = {
    "output_dir": "outputs",
    "run": {"name": "first"},
    "clean": False,
    "resume": None,
    "max_steps": 6,
    "optim": {"type": "adamw", "lr": 0.003, "betas": [0.9, 0.95]},
    "model": {"name": None, "arch": {"model_type": "llama", "hidden_size": 32}},
}

Record = dict[str, Any]
MakeRun = Callable[..., Path]


def step_record(step: int, **changes: Any) -> Record:
    """The metrics of one step: a loss that falls, and what goes with it."""
    record = {
        "step": step,
        "loss/mean": 5.0 - step / 8,
        "loss/spike": 0.0,
        "optim/lr": 0.001 * step,
        "optim/grad_norm": 1.0 / step,
        "optim/skipped_steps": 0,
        "perf/throughput": 1000.0,
        "progress/num_tokens": 2048 * step,
        "time/step": 3.6,
        "digest/rows": f"{step:016x}",
    }
    return record | {name.replace("__", "/"): value for name, value in changes.items()}


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(name: str, records: Iterable[Record] | str | bytes, config: Record | None = None) -> Path:
        """A run directory.

        Args:
            records: lines of metrics.jsonl, or the file's content as it is.
            config: tables to merge into CONFIG.
        """
        run_dir = tmp_path / name
        (run_dir / "configs").mkdir(parents=True)
        merged = copy.deepcopy(CONFIG)
        for key, value in (config or {}).items():
            merged[key] = (merged.get(key) or {}) | value if isinstance(value, dict) else value
        (run_dir / "configs" / "sft.json").write_text(json.dumps(merged))
        if not isinstance(records, str | bytes):
            records = "".join(json.dumps(record) + "\n" for record in records)
        content = records.encode() if isinstance(records, str) else records
        (run_dir / "metrics.jsonl").write_bytes(content)
        return run_dir

    return make


@pytest.fixture
def record() -> Callable[..., Record]:
    """`record(3, loss__mean=1.0)`: a step's metrics with changes."""
    return step_record
