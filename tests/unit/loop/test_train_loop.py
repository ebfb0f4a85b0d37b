"""The loop in this process, on rows that make trouble: what it skips, where it goes back to, what it counts."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.sft import SFTConfig
from models.batch import IGNORE_INDEX
from trainer.data.build import build_source
from trainer.data.digest import format_digest
from trainer.data.loader import RowLoader
from trainer.data.row import Rows, RowSource
from trainer.errors import RunError
from trainer.hooks import HookContext
from trainer.preflight import plan_run
from trainer.run import Run, StopSignal
from trainer.train import Trainer

ARCH = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
POISON = 66
"""A token id that only bad rows hold."""

EMBEDDING = "model.embed_tokens.weight"


class Edited:
    """Rows of another source, each changed by `edit(row number in its epoch, input_ids, labels)`."""

    def __init__(self, source: RowSource, edit: Callable[[int, np.ndarray, np.ndarray], None]) -> None:
        self._source, self._edit = source, edit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def fill(self, epoch: int, indices: np.ndarray, out: Rows) -> None:
        self._source.fill(epoch, indices, out)
        for row, index in enumerate(indices.tolist()):
            self._edit(index, out.input_ids[row], out.labels[row])


class Recorder:
    """A hook that keeps the parameters before and after each optimizer step."""

    def __init__(self) -> None:
        self.before: dict[int, dict[str, Tensor]] = {}
        self.after: dict[int, dict[str, Tensor]] = {}

    def before_optimizer_step(self, context: HookContext) -> None:
        self.before[context.step] = {name: p.detach().clone() for name, p in context.model.named_parameters()}

    def after_optimizer_step(self, context: HookContext) -> None:
        self.after[context.step] = {name: p.detach().clone() for name, p in context.model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run that has ended."""

    trainer: Trainer
    records: list[dict[str, Any]]

    def column(self, name: str) -> list[Any]:
        return [record[name] for record in self.records]


class Bench:
    """Builds trainers in one folder; `edit` changes the rows they read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.edit: Callable[[int, np.ndarray, np.ndarray], None] = lambda index, ids, labels: None

    def config(self, name: str, **tables: Any) -> SFTConfig:
        data = {"type": "fake", "seq_len": 12, "batch_size": 4, "micro_batch_size": 1, "num_rows": 100}
        data |= {"length": "variable", "input_ids": "random", "num_workers": 0} | tables.pop("data", {})
        model = {"arch": ARCH, "init": {"std": 0.1}, "compute_dtype": "float32"}
        values = {"model": model, "data": data, "output_dir": str(self.folder), "run": {"name": name}}
        return SFTConfig.model_validate(values | tables)

    def source(self, config: SFTConfig) -> RowSource:
        plain = build_source(config.data, vocab_size=67, eos_token_id=None, tokenizer_name=None)
        return cast(RowSource, Edited(plain, self.edit))

    def trainer(self, config: SFTConfig) -> Trainer:
        run_dir = self.folder / str(config.run.name)
        run_dir.mkdir(parents=True, exist_ok=True)
        return Trainer(config, Run(dir=run_dir, attempt=0, stop=StopSignal()))

    def run(self, trainer: Trainer, *hooks: Recorder) -> Ended:
        trainer.hooks.extend(hooks)
        try:
            trainer.run()
        finally:
            trainer.close()
        lines = (trainer.run_info.dir / "metrics.jsonl").read_text().splitlines()
        records = [record for record in map(json.loads, lines) if record["step"]]
        return Ended(trainer=trainer, records=records)

    def digests(self, config: SFTConfig, steps: list[int]) -> list[str]:
        """Of the rows that a run which never skips anything reads in these steps, from 0."""
        data = config.data
        loader = RowLoader(
            self.source(config),
            batch_size=data.batch_size,
            micro_batch_size=data.micro_batch_size,
            dp_rank=0,
            dp_size=1,
            num_workers=0,
            pin_memory=False,
        )
        return [format_digest(loader.step(step).digest) for step in steps]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    made = Bench(tmp_path)

    def build(*args: Any, **kwargs: Any) -> RowSource:
        return cast(RowSource, Edited(build_source(*args, **kwargs), made.edit))

    monkeypatch.setattr("trainer.preflight.inputs.build_source", build)
    return made


def mask_steps(*steps: int) -> Callable[[int, np.ndarray, np.ndarray], None]:
    """No loss in the rows of these steps."""

    def edit(index: int, ids: np.ndarray, labels: np.ndarray) -> None:
        if index // 4 in steps:
            labels[:] = IGNORE_INDEX

    return edit


def test_a_partial_window_is_no_step_and_is_declared(bench: Bench) -> None:
    """Field case R15: 10 micro-batches in windows of 4. One pass over the data gives 2 updates and says what it
    covers; where more passes are allowed the next one fills the window, and nothing is dropped."""
    one_pass = bench.config("one", data={"num_rows": 10, "max_epochs": 1})
    plan = plan_run(one_pass, bench.source(one_pass), 1)
    assert (plan.steps, plan.grad_accum_steps, plan.epochs) == (2, 4, 0.8)
    assert any("2 steps of 4 rows" in line and "0.8 epochs of 10 rows" in line for line in plan.lines())
    ended = bench.run(bench.trainer(one_pass))
    assert ended.column("progress/num_samples") == [4, 8]
    three = bench.config("three", data={"num_rows": 10}, max_steps=3)
    ended = bench.run(bench.trainer(three))
    assert ended.column("progress/epoch") == [0.4, 0.8, 1.2]
    with pytest.raises(ConfigError, match="allows 2 steps"):
        plan_run(one_pass.model_copy(update={"max_steps": 3}), bench.source(one_pass), 1)


def test_a_step_without_loss_tokens_changes_nothing(bench: Bench) -> None:
    """Field cases R15, R18: a window of masked rows makes no NaN in the weights and is counted as skipped."""
    bench.edit = mask_steps(2)
    recorder = Recorder()
    ended = bench.run(bench.trainer(bench.config("masked", max_steps=5)), recorder)
    for step in range(5):
        same = [torch.equal(recorder.before[step][name], p) for name, p in recorder.after[step].items()]
        assert all(same) if step == 2 else not any(same)
    assert ended.column("optim/skipped_steps") == [0, 0, 1, 1, 1]
    assert ended.column("loss/nan_count") == [0] * 5
    assert [loss is None for loss in ended.column("loss/mean")] == [False, False, True, False, False]
    assert ended.column("optim/grad_norm")[2] == 0.0
    assert ended.column("progress/num_loss_tokens") == [48, 96, 96, 144, 192]
    assert ended.column("progress/num_tokens") == [48, 96, 144, 192, 240]
    assert {count.item() for count in ended.trainer.optimizer.step_counts().values()} == {4.0}
    assert all(torch.isfinite(p).all() for p in recorder.after[4].values())


def test_rows_without_loss_in_a_step_weigh_nothing(bench: Bench) -> None:
    """The mean is over the loss tokens of the step: three masked rows beside one leave the loss of that one."""
    plain = bench.run(bench.trainer(bench.config("alone", max_steps=1, data={"batch_size": 1})))

    def only_first(index: int, ids: np.ndarray, labels: np.ndarray) -> None:
        if index:
            labels[:] = IGNORE_INDEX

    bench.edit = only_first
    masked = bench.run(bench.trainer(bench.config("beside", max_steps=1)))
    assert masked.column("loss/mean") == pytest.approx(plain.column("loss/mean"), rel=1e-6)
    assert masked.column("optim/grad_norm") == pytest.approx(plain.column("optim/grad_norm"), rel=1e-6)


def poison_steps(*steps: int) -> Callable[[int, np.ndarray, np.ndarray], None]:
    """One token of one row of these steps is POISON; no other row holds it."""

    def edit(index: int, ids: np.ndarray, labels: np.ndarray) -> None:
        ids %= POISON
        labels %= POISON
        if index // 4 in steps and index % 4 == 1:
            ids[3] = POISON

    return edit


def poisoned_trainer(bench: Bench, name: str, **guard: int) -> Trainer:
    """Its embedding of POISON is NaN, so that the loss of a step is NaN exactly where its rows hold that id."""
    bench.edit = poison_steps(*range(6, 12))
    config = bench.config(name, max_steps=14, ckpt={"interval": 4}, nan_guard=guard)
    trainer = bench.trainer(config)
    trainer.grad_sync.masters[EMBEDDING][POISON] = torch.nan
    trainer.grad_sync.publish()
    return trainer


def test_going_back_twice_passes_over_all_bad_rows(bench: Bench) -> None:
    """Field case R94: bad rows of six steps, found three at a time. Both times the run goes back to step_8; the second
    time it must not read again what it passed over the first time."""
    trainer = poisoned_trainer(bench, "poisoned", max_consecutive=3, max_rewinds=2)
    ended = bench.run(trainer)
    assert ended.column("step") == list(range(1, 15))
    assert ended.column("digest/rows") == bench.digests(trainer.config, [*range(8), *range(12, 18)])
    # Steps 7, 8 and 9 (from 1), then 9, 10 and 11 once more.
    assert ended.column("optim/skipped_steps") == [0] * 6 + [1, 2] + [6] * 6
    assert ended.column("loss/nan_count")[-1] == 6
    assert [loss is None for loss in ended.column("loss/mean")] == [6 <= step < 8 for step in range(14)]
    assert ended.column("progress/num_samples") == [4 * step for step in range(1, 15)]
    assert ended.column("progress/num_tokens")[-1] == 14 * 4 * 12
    assert ended.column("progress/epoch")[8:] == [0.04 * step for step in range(13, 19)]
    assert {count.item() for count in trainer.optimizer.step_counts().values()} == {12.0}
    for name, master in trainer.grad_sync.masters.items():
        rows = master[:POISON] if name == EMBEDDING else master
        assert torch.isfinite(rows).all()


def test_rewinds_are_numbered(bench: Bench) -> None:
    trainer = poisoned_trainer(bench, "too_few", max_consecutive=3, max_rewinds=1)
    with pytest.raises(RunError, match=r"^steps 9 to 11 were all skipped.*no nan_guard.max_rewinds left"):
        bench.run(trainer)


def test_no_checkpoint_to_go_back_to(bench: Bench) -> None:
    bench.edit = mask_steps(0, 1)
    config = bench.config("nowhere", max_steps=4, nan_guard={"max_consecutive": 2}, ckpt={"interval": 3})
    with pytest.raises(RunError, match=r"^steps 1 to 2 were all skipped.*there is no checkpoint to go back to"):
        bench.run(bench.trainer(config))


def test_bad_steps_at_the_end_of_a_run(bench: Bench) -> None:
    """The last step's verdict is read before the final checkpoint: the run goes back and still makes all its steps."""
    bench.edit = mask_steps(4, 5)
    config = bench.config("end", max_steps=6, nan_guard={"max_consecutive": 2}, ckpt={"interval": 3})
    ended = bench.run(bench.trainer(config))
    assert ended.column("step") == [1, 2, 3, 4, 5, 6]
    assert ended.column("digest/rows") == bench.digests(config, [0, 1, 2, 3, 6, 7])
    assert ended.column("optim/skipped_steps") == [0, 0, 0, 2, 2, 2]


@pytest.fixture
def saved(bench: Bench) -> Ended:
    """Eight steps, with a checkpoint after the fourth."""
    config = bench.config("saved", max_steps=8, ckpt={"interval": 4}, scheduler={"type": "cosine", "warmup_steps": 2})
    return bench.run(bench.trainer(config))


def resumed(bench: Bench, saved: Ended, name: str, **skips: bool) -> Ended:
    resume = {"step": 4, "dir": str(saved.trainer.run_info.dir)}
    scheduler = {"type": "cosine", "warmup_steps": 2}
    config = bench.config(name, max_steps=8, ckpt={"interval": 4} | skips, scheduler=scheduler, resume=resume)
    trainer = bench.trainer(config)
    moments = trainer.optimizer.moments()["exp_avg"].values()
    assert all(moment.any() for moment in moments) != skips.get("skip_optimizer", False)
    return bench.run(trainer)


def test_resume_skips_only_what_it_is_told_to(bench: Bench, saved: Ended) -> None:
    names = ("step", "loss/mean", "optim/lr", "digest/rows", "progress/num_tokens", "progress/epoch")
    whole = {name: saved.column(name) for name in names}
    ended = resumed(bench, saved, "nothing")
    assert {name: ended.column(name) for name in names} == {name: values[4:] for name, values in whole.items()}

    ended = resumed(bench, saved, "optimizer", skip_optimizer=True)
    assert ended.column("loss/mean")[0] == whole["loss/mean"][4]
    assert ended.column("loss/mean")[1] != whole["loss/mean"][5]
    assert ended.column("digest/rows") == whole["digest/rows"][4:]
    assert {count.item() for count in ended.trainer.optimizer.step_counts().values()} == {4.0}

    ended = resumed(bench, saved, "data", skip_dataloader=True)
    assert ended.column("digest/rows") == whole["digest/rows"][:4]
    assert ended.column("step") == [5, 6, 7, 8]
    assert ended.column("progress/num_tokens") == whole["progress/num_tokens"][4:]

    ended = resumed(bench, saved, "schedule", skip_scheduler=True)
    rates = ended.column("optim/lr")
    assert rates[:2] == whole["optim/lr"][:2] and rates[-1] == 0.0
    assert ended.column("digest/rows") == whole["digest/rows"][4:]

    ended = resumed(bench, saved, "progress", skip_progress=True)
    assert ended.column("step") == list(range(1, 9))
    assert ended.column("progress/num_tokens") == whole["progress/num_tokens"]
    assert ended.column("optim/lr") == whole["optim/lr"]
    assert ended.column("digest/rows")[:4] == whole["digest/rows"][4:]


def test_resume_with_another_schedule_goes_on_along_it(bench: Bench, saved: Ended) -> None:
    """Field case R77: the rate is a function of the step alone, so that a new shape is taken up where the run is."""
    scheduler = {"type": "linear", "warmup_steps": 2, "decay_steps": 4}
    resume = {"step": 4, "dir": str(saved.trainer.run_info.dir)}
    config = bench.config("other_schedule", max_steps=8, scheduler=scheduler, resume=resume)
    ended = bench.run(bench.trainer(config))
    assert ended.column("optim/lr") == [config.optim.lr * share for share in (0.75, 0.5, 0.25, 0.0)]


def test_a_tied_checkpoint_does_not_fit_an_untied_model(bench: Bench, saved: Ended) -> None:
    """Field case R70: a mismatch between config and checkpoint is an error that names the tensor."""
    model = {"arch": ARCH | {"tie_word_embeddings": True}, "compute_dtype": "float32"}
    resume = {"step": 4, "dir": str(saved.trainer.run_info.dir)}
    config = bench.config("tied", max_steps=8, model=model, resume=resume)
    with pytest.raises(RunError, match=r"in the checkpoint only: model\.lm_head\.weight"):
        bench.trainer(config)


def test_going_back_to_the_resumed_checkpoint_skips_the_same(bench: Bench) -> None:
    """`ckpt.skip_*` holds for the checkpoint that a run was resumed from, the second time it is loaded too."""
    bench.edit = mask_steps(1, 2)
    first = bench.config("again", max_steps=4, ckpt={"interval": 4})
    bench.run(bench.trainer(first))
    skips = {"skip_dataloader": True, "skip_optimizer": True, "skip_scheduler": True}
    config = bench.config(
        "again",
        max_steps=8,
        ckpt={"interval": 8} | skips,
        scheduler={"type": "cosine", "warmup_steps": 2},
        nan_guard={"max_consecutive": 2},
        resume={},
    )
    ended = bench.run(bench.trainer(config))
    assert ended.column("step") == list(range(1, 9))
    assert ended.column("digest/rows")[4:] == bench.digests(config, [0, 3, 4, 5])
    rates = ended.column("optim/lr")[4:]
    assert rates[0] == rates[1] / 2 and rates[-1] == 0.0
    assert {count.item() for count in ended.trainer.optimizer.step_counts().values()} == {4.0}


def test_utilisation_counts_matrices_and_the_attention_really_done(bench: Bench, monkeypatch) -> None:
    """Field case R109, through the loop: head in, look-up out, pairs inside documents only."""
    monkeypatch.setattr("trainer.report.peak_flops", lambda device: 1e9)
    config = bench.config("utilised", max_steps=2)
    ended = bench.run(bench.trainer(config))
    loader = RowLoader(
        bench.source(config),
        batch_size=4,
        micro_batch_size=1,
        dp_rank=0,
        dp_size=1,
        num_workers=0,
        pin_memory=False,
    )
    tokens, width, head_width = 4 * 12, 16, 2 * 8
    matrices = 4 * width * head_width + 3 * width * 24 + 67 * width
    for step, record in enumerate(ended.records):
        pairs = sum(batch.attention_pairs for batch in loader.step(step).micro_batches)
        assert 0 < pairs < 4 * 12 * 13 // 2
        flops = 6 * matrices * tokens + 12 * head_width * pairs
        assert record["perf/mfu"] == pytest.approx(100 * flops / record["time/step"] / 1e9)
        with_norms = matrices + 3 * width
        assert record["perf/mfu_6dn"] == pytest.approx(100 * 6 * with_norms * tokens / record["time/step"] / 1e9)


def test_replicas_that_differ_end_the_run(bench: Bench, monkeypatch) -> None:
    """At the step whose checksum shows it; of the others nothing is compared."""
    monkeypatch.setattr("trainer.report.read_checksum", lambda sums, mesh: None)
    trainer = bench.trainer(bench.config("differing", max_steps=6, log={"checksum_interval": 4}))
    with pytest.raises(RunError, match=r"^the replicas' weights differ after step 4: "):
        bench.run(trainer)
