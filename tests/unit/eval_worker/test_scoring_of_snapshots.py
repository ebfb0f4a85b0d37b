"""The loop of an eval-worker: which snapshot is next, what becomes of each, when it ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.eval_worker import EvalWorkerConfig
from trainer.errors import RunError
from trainer.eval_worker.training import scored_config
from trainer.evaluate import Evaluator
from trainer.run import StopSignal
from trainer.snapshots import queue


@pytest.fixture
def on_score(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], list[int]]:
    """`on_score(action)` does `action(step)` at the beginning of every round; gives the list of steps to come."""

    def install(action: Callable[[int], None]) -> list[int]:
        steps: list[int] = []
        real = Evaluator.score

        def score(self: Evaluator, step: int, **arguments: Any) -> Any:
            steps.append(step)
            action(step)
            return real(self, step, **arguments)

        monkeypatch.setattr(Evaluator, "score", score)
        return steps

    return install


def stopped() -> StopSignal:
    stop = StopSignal()
    stop._handle(15, None)
    return stop


def test_newest_first_then_the_others_and_then_it_ends(bench, messages) -> None:
    """What is recorded is what the training found at the same steps, and nothing is left but the mark of the end."""
    assert bench.snapshots() == ["final.json", "step_2", "step_4", "step_6"]
    bench.scorer().run()
    assert bench.late_steps() == [6, 4, 2]
    own = {record["step"]: record for record in bench.records() if "time/val" in record}
    for record in bench.records():
        if "time/eval" in record:
            expected = {name: value for name, value in own[record["step"]].items() if name.startswith("val/")}
            assert expected and {name: record[name] for name in record if name.startswith("val/")} == expected
    assert bench.snapshots() == ["final.json"]
    assert messages("done") == ["done: the last snapshot of the training is scored; scored by this worker: 3"]
    bench.scorer().run()  # another one has nothing to do, and sees that
    assert bench.late_steps() == [6, 4, 2]


def test_what_comes_meanwhile_and_is_newer_goes_first(bench, on_score) -> None:
    later = {step: queue.snapshot_path(bench.run_dir, step) for step in (4, 6)}
    for path in later.values():
        path.rename(bench.run_dir / path.name)

    def arrive(step: int) -> None:
        if step == 2:
            for path in later.values():
                (bench.run_dir / path.name).rename(path)

    on_score(arrive)
    bench.scorer().run()
    assert bench.late_steps() == [2, 6, 4]


def test_what_a_killed_worker_had_claimed_is_scored(bench, messages) -> None:
    assert queue.claim(bench.run_dir, 4) is not None
    bench.scorer().run()
    assert bench.late_steps() == [6, 4, 2]
    assert messages("waits again") == ["the snapshot of step 4 waits again"]


def test_a_stop_in_a_round_leaves_the_snapshot_waiting(bench, on_score, messages) -> None:
    stop = StopSignal()

    def ask(step: int) -> None:
        if step == 4:
            stop._handle(2, None)

    on_score(ask)
    bench.scorer(stop).run()
    assert bench.late_steps() == [6]
    assert bench.snapshots() == ["final.json", "step_2", "step_4"]
    assert messages("stopped") == ["stopped on request; scored by this worker: 1"]


def test_a_stop_before_a_round_claims_nothing(bench) -> None:
    bench.scorer(stopped()).run()
    assert bench.snapshots() == ["final.json", "step_2", "step_4", "step_6"]


def test_a_training_that_goes_back_meanwhile_gets_no_result_of_the_weights_it_left(bench, on_score, messages) -> None:
    """Scored, loaded or waiting: only what lies at or before the step that it went back to is recorded. Then there is
    more to come."""
    stop = StopSignal()

    def go_back(step: int) -> None:
        if step == 6:
            queue.cut_back(bench.run_dir, 3)
        else:
            stop._handle(15, None)

    rounds = on_score(go_back)
    scorer = bench.scorer(stop)
    scorer.run()
    assert rounds == [6, 2] and bench.late_steps() == []
    assert bench.snapshots() == ["step_2"]
    assert messages("gone back") == ["step 6: not recorded, the training has gone back behind it"]


def test_a_snapshot_that_goes_before_it_is_loaded_is_passed_over(
    bench, messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Evaluator.load

    def load(self: Evaluator, path: Path) -> int:
        if path.name == "step_6.scoring":
            queue.discard(path)
        return real(self, path)

    monkeypatch.setattr(Evaluator, "load", load)
    bench.scorer().run()
    assert bench.late_steps() == [4, 2]
    assert messages("gone back") == ["step 6: passed over, the training has gone back behind it"]


@pytest.mark.parametrize("part", ["__0_0.distcp", "state.json", ".metadata"])
def test_a_damaged_snapshot_is_passed_over_and_told_at_the_end(bench, messages, part: str) -> None:
    """Not tried again and again, nor thrown away; the others are scored, and the exit code says that one has no
    result."""
    path = queue.snapshot_path(bench.run_dir, 4) / part
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"^snapshots that could not be loaded have no result: .*/step_4; delete"):
        bench.scorer().run()
    assert bench.late_steps() == [6, 2]
    assert bench.snapshots() == ["final.json", "step_4"]
    (warning,) = messages("is passed over")
    assert warning.startswith("the snapshot of step 4 is passed over: checkpoint ")


def test_it_ends_with_an_error_when_nothing_comes(bench) -> None:
    queue.unmark_final(bench.run_dir)
    with pytest.raises(RunError, match=r"no snapshot has come for max_idle_minutes = 0\.0005, and the training in"):
        bench.scorer(max_idle_minutes=0.0005).run()
    assert bench.late_steps() == [6, 4, 2]


def test_another_suite_than_the_runs_own(bench, tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text('{"text": "bako ritu selmon"}\n{"text": "tu"}\n')
    val = {"data_dir": str(tmp_path), "sets": ["words"], "seq_lens": [16], "micro_batch_tokens": 64}
    bench.scorer(val=val | {"save_arrays": True}).run()
    late = [record for record in bench.records() if "time/eval" in record]
    names = {"step", "time/eval", "val/words/loss@16", "val/words/perplexity@16", "val/words/bpb@16"}
    assert [set(record) for record in late] == [names] * 3
    written = sorted(str(path.relative_to(bench.run_dir)) for path in (bench.run_dir / "val").rglob("*.parquet"))
    assert written == [f"val/step_{step}/words.parquet" for step in (2, 4, 6)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_the_layout_of_the_training_is_not_that_of_the_worker(bench) -> None:
    """Nor are weights of FSDP moved to the host where there is no GPU to move them from."""
    layout = {"cp": 2, "dp_replicate": 2, "defer_replicate_sync": True, "fsdp_cpu_offload": True}
    training = bench.training.model_copy(update={"model": bench.training.model.model_copy(update=layout)})
    scored = scored_config(EvalWorkerConfig(run_dir=bench.run_dir), training)
    assert scored.model == bench.training.model
