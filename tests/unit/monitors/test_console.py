"""The lines of a run: what they show and when."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.monitors.console import ConsoleMonitor, format_step, format_validation

STEP = {
    "loss/mean": 3.21449,
    "loss/perplexity": 24.9,
    "optim/lr": 3e-4,
    "optim/grad_norm": 0.8123,
    "perf/throughput": 51234.0,
    "perf/mfu": 41.27,
    "perf/peak_memory": 12.34,
    "progress/epoch": 0.0119,
    "digest/rows": "00ff00ff00ff00ff",
}


def test_line_of_a_step() -> None:
    assert format_step(120, 2000, STEP) == (
        "step  120/2000 | loss 3.2145 | lr 3.00e-04 | grad norm 0.812 | 51.2k tok/s | mfu 41.3% | mem 12.3 GiB"
        " | epoch 0.012"
    )


def test_what_was_not_measured_is_left_out() -> None:
    assert format_step(7, 10, {"loss/mean": float("nan"), "optim/lr": 0.0}) == "step  7/10 | loss nan | lr 0.00e+00"


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0.0, "0"), (950.2, "950"), (999.7, "1k"), (12_345.0, "12.3k"), (512_000.0, "512k"), (2.5e6, "2.5M")],
)
def test_throughput_is_short(number: float, shown: str) -> None:
    assert format_step(1, 1, {"perf/throughput": number}) == f"step 1/1 | {shown} tok/s"


def test_a_line_for_each_held_out_set_and_length() -> None:
    metrics = {
        "val/stdlib/loss@1k": 3.0,
        "val/stdlib/perplexity@1k": 20.0855,
        "val/stdlib/bpb@1k": 1.25,
        "val/stdlib/bpb@2k": 1.125,
        "val/docs.v2/bpb@1k": 1.5,
        "val/loss": 2.0,
        "time/val": 1.0,
    }
    assert format_validation(100, 2000, metrics) == [
        "step  100/2000 | val stdlib @1k | loss 3.0000 | perplexity 20.0855 | bpb 1.2500",
        "step  100/2000 | val stdlib @2k | bpb 1.1250",
        "step  100/2000 | val docs.v2 @1k | bpb 1.5000",
        "step  100/2000 | val | loss 2.0000",
    ]


def test_every_interval_th_step_the_last_and_every_validation(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trainer")
    console = ConsoleMonitor(interval=4, start_step=0, total_steps=10)
    console.log(0, {"params/total": 3})
    for step in range(1, 11):
        console.log(step, {"loss/mean": 1.0})
    console.log(7, {"val/a/bpb@1k": 1.0})
    console.close()
    assert [record.getMessage() for record in caplog.records] == [
        "step  4/10 | loss 1.0000",
        "step  8/10 | loss 1.0000",
        "step 10/10 | loss 1.0000",
        "step  7/10 | val a @1k | bpb 1.0000",
    ]


def test_a_machine_without_wandb_can_log() -> None:
    """The GPU machine has no wandb, and it takes half a second to import."""
    code = "import sys; sys.modules['wandb'] = None; import trainer.monitors"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3] / "src", timeout=60, check=True)


def test_a_long_round_has_a_line_now_and_then_where_no_one_watches(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = ConsoleMonitor(interval=1, start_step=0, total_steps=None)
    now = 100.0
    monkeypatch.setattr("trainer.progress.time.monotonic", lambda: now)
    with caplog.at_level(logging.INFO):
        for _ in range(2):  # the second round counts from its own start
            for completed in range(1, 11):
                monitor.show_part("validation", completed, 10)
                now += 4.0
    assert caplog.messages == ["validation: 5 of 10 (50%), ETA 20.0 s", "validation: 9 of 10 (90%), ETA 4.0 s"] * 2
