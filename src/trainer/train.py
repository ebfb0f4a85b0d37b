"""The training loop. Pretraining and fine-tuning, one GPU or many: this file."""

import logging
import math
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configs.checkpoint import CheckpointConfig
from configs.sft import SFTConfig
from trainer.adapters import adapter_record, check_resumed
from trainer.checkpoint import Checkpointer, find_first, read_state, skips_of
from trainer.checkpoint.agreement import agree
from trainer.data.chat.build import chat_tools
from trainer.data.loader import RowLoader
from trainer.data.row import untracked
from trainer.errors import RunError
from trainer.garbage import GarbageCollection
from trainer.heartbeat import Phase
from trainer.hooks import Hook, HookContext
from trainer.micro_batch import run_micro_batches
from trainer.model_setup import build_parallel_model, load_frozen_weights, make_deterministic, set_first_weights
from trainer.monitors import build_monitors
from trainer.monitors.jsonl import json_value
from trainer.nan_guard import NanGuard
from trainer.optim.build import build_optimizer
from trainer.optim.gradients import clip_gradients, gradient_norms
from trainer.optim.schedule import learning_rate
from trainer.parallel.mesh import build_mesh
from trainer.parallel.stop_votes import StopVotes
from trainer.preflight import memory_lines, plan_run, prepare
from trainer.report import Metrics, StepMarks, StepReport, StepReporter, parameter_counts
from trainer.run import Run
from trainer.snapshots.writer import SnapshotWriter
from trainer.state import TrainState, model_record
from trainer.validation import build_validation

log = logging.getLogger(__name__)


def train(config: SFTConfig, run: Run) -> None:
    """Train one run to its last step, or until a signal asks it to stop. Called in every worker.

    Raises:
        ConfigError: what the config points to cannot be used.
        RunError: the run failed for a reason that can be named.
    """
    trainer = Trainer(config, run)
    try:
        trainer.run()
    except BaseException:
        # Nothing here may wait for other ranks: they would keep this one from being seen to have failed.
        trainer.close_monitors(exit_code=1)
        raise
    finally:
        trainer.garbage.close()
    trainer.close()


class Trainer:
    """One run: built from its config, then taken through its steps."""

    def __init__(self, config: SFTConfig, run: Run) -> None:
        self.config, self.run_info = config, run
        self.beat, self.garbage = run.heartbeat.beat, GarbageCollection(config.gc_interval)
        self.beat(Phase.LOADING)
        if config.deterministic:
            make_deterministic()
        self.mesh = mesh = build_mesh(
            config.deployment.timeout_seconds, dp_replicate=config.dp_replicate, cp=config.model.cp
        )
        inputs = prepare(config)
        self.model_folder = inputs.model_folder
        self.plan = plan_run(config, inputs.source, mesh.world_size)
        if mesh.device.type == "cuda" and mesh.rank == 0:
            capacity = torch.cuda.get_device_properties(mesh.device).total_memory
            for line in memory_lines(config, inputs, self.plan, capacity=capacity):
                log.info(line)
        self.model, self.grad_sync = build_parallel_model(
            config.model, inputs.model_config, seq_len=config.longest_row, mesh=mesh
        )
        num_dims = {name: parameter.dim() for name, parameter in self.model.canonical_parameters().items()}
        self.optimizer = build_optimizer(
            config.optim, self.grad_sync.masters, num_dims, offload=config.model.optim_cpu_offload
        )
        log.info("optimizer: %s", self.optimizer.decay_table())
        pin_memory = mesh.device.type == "cuda"
        self.loader = RowLoader(
            inputs.source,
            batch_size=config.data.batch_size,
            micro_batch_size=config.data.micro_batch_size,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
            num_workers=config.data.num_workers,
            pin_memory=pin_memory,
        )
        self.hooks: list[Hook] = []
        self.state = TrainState(self.grad_sync, self.optimizer, self.loader, NanGuard(config.nan_guard), self.hooks)
        self.adapters = adapter_record(config.model, inputs.model_folder)
        has_tokenizer = inputs.tokenizer is not None
        record = model_record(config, inputs.model_config, has_tokenizer=has_tokenizer, adapters=self.adapters)
        self.checkpointer = Checkpointer(run.dir, config.ckpt, mesh, record)
        self.snapshots = SnapshotWriter(
            run.dir, config, self.state, self.checkpointer, mesh, record, total_steps=self.plan.steps
        )
        self.validation = build_validation(
            config.val,
            tokenizer=inputs.tokenizer,
            vocab_size=inputs.model_config.vocab_size,
            mesh=mesh,
            pin_memory=pin_memory,
            chats=chat_tools(config, inputs.tokenizer, untracked),
            cache_dir=config.val_cache,
            arrays_dir=run.dir / "val" if config.val is not None and config.val.save_arrays else None,
        )
        self.resumed_from: Path | None = None
        self.skips = CheckpointConfig()
        self.resumed_metrics: Metrics = {}
        wandb_id = self._first_weights()
        step = self.state.progress.step
        self.snapshots.go_on_from(step)  # before metrics.jsonl is cut back, as in `_go_back`
        self.monitors = None
        if mesh.rank == 0:
            self.monitors = build_monitors(
                config,
                run.dir,
                start_step=step,
                total_steps=self.plan.steps,
                wandb_id=wandb_id,
                starts_anew=self.resumed_from is None,
            )
        for note in self.validation.notes if self.validation else []:
            log.info(note)
        self.reporter = StepReporter(self.model, self.state, mesh, checksum_interval=config.log.checksum_interval)
        self.stopping = False
        if config.ckpt is not None:
            self.checkpointer.check_space(self.state.tensors())
        self.snapshots.check_space()

    def run(self) -> None:
        """All steps from where the state stands."""
        config, clock = self.config, self.reporter.clock
        step = first_step = self.state.progress.step
        self._begin(step)
        step_start = clock.mark()
        phase = Phase.FIRST_STEP
        self.garbage.start()
        while step < self.plan.steps and not self.stopping:
            self.beat(Phase.DATA, step + 1)
            batches = self.loader.step(step)
            self.beat(phase)
            forward = clock.mark()
            result = run_micro_batches(
                self.model, batches.micro_batches, batches.num_loss_tokens, self.grad_sync, self.mesh, step=step
            )
            backward = clock.mark()

            self.beat(Phase.DEVICE)
            # The one wait of a step, for the device to end the step before; every rank reads the same there.
            report = self.reporter.read()
            if report is not None:
                self._log(report.step + 1, report.metrics)
                self.stopping |= report.stop_requested
                if report.verdict != "go on":
                    step, step_start = self._go_back(report), clock.mark()
                    continue

            self.beat(Phase.OPTIMIZER)
            phase = Phase.FORWARD_BACKWARD
            gradients = self.grad_sync.gradients()
            norms = gradient_norms(gradients, result.nats, result.loss_tokens, self.mesh)
            if config.optim.max_norm is not None:
                clip_gradients(gradients, norms.total, config.optim.max_norm)
            context = HookContext(model=self.model, step=step, update_ok=norms.update_ok, gradients=gradients)
            for hook in self.hooks:
                hook.before_optimizer_step(context)
            lr, update = self._learning_rate(step), clock.mark()
            self.optimizer.step(gradients, lr, norms.update_ok)
            self.grad_sync.clear_gradients()
            self.grad_sync.publish()
            for hook in self.hooks:
                hook.after_optimizer_step(context)
            del gradients, context  # or they would take up memory until those of the next step are there

            step_end = clock.mark()
            self.reporter.collect(
                step,
                batches=batches,
                result=result,
                norms=norms,
                marks=StepMarks(start=step_start, forward=forward, backward=backward, update=update, end=step_end),
                lr=lr,
                epoch=self.loader.epochs(step + 1),
                stop_requested=self.run_info.stop.requested,
            )
            step, step_start = step + 1, step_end
            self.garbage.after_step(step)
            due = self._saves(step) or self.snapshots.due(step) or self._validates(step)
            if due or step == self.plan.steps or self.stopping:
                step, step_start = self._rest(step), clock.mark()
        self._finish(step, first_step)

    def _begin(self, step: int) -> None:
        """What is recorded before the first step; or, when a stop was asked for meanwhile, a checkpoint only."""
        self.stopping = any(agree(self.mesh, lambda: self.run_info.stop.requested))
        if not self.stopping:
            if step == 0:
                val = self.config.val
                validates = val is not None and val.eval_on_start
                self._log(0, parameter_counts(self.model) | (self._validate(0) if validates else {}))
            elif self._resumes_here:
                self._make_up(step)
        if self.stopping and self.config.ckpt is not None and not self._resumes_here:
            self._save(step, {})

    @property
    def _resumes_here(self) -> bool:
        """The run goes on from a checkpoint of its own, not from one of another run."""
        path = self.resumed_from
        return path is not None and path.resolve().is_relative_to(self.run_info.dir.resolve())

    def _rest(self, step: int) -> int:
        """Between two steps: read what is under way, then checkpoint, validation, one log call. Gives the next step."""
        self.beat(Phase.DEVICE)
        report = self.reporter.read()
        assert report is not None
        self.stopping |= report.stop_requested
        if report.verdict != "go on":
            self._log(step, report.metrics)
            return self._go_back(report)
        metrics = report.metrics
        try:
            saved = self._saves(step)
            if saved:
                metrics = metrics | self._save(step, metrics)
            if self.snapshots.due(step):
                self.beat(Phase.SNAPSHOT)
                metrics = metrics | self.snapshots.save(step, self._wandb_id)
            if self._validates(step):
                metrics = metrics | self._validate(step)
            if self._saves(step) and not saved:  # a stop was asked for during the validation
                metrics = metrics | self._save(step, metrics)
        except RunError:
            # The step was taken, whatever became of the rest; and the first failure is the one to tell.
            with suppress(RunError):
                self._log(step, metrics)
            raise
        self._log(step, metrics)
        return step

    def _make_up(self, step: int) -> None:
        """Record what the run had no time for after the checkpoint of `step`, when it was killed: the step's metrics,
        its validation, its snapshot and its weights."""
        recorded = agree(self.mesh, lambda: self.monitors.recorded if self.monitors else None)[0]
        assert recorded is not None, "rank 0 has monitors"
        metrics = {} if "loss/mean" in recorded else self.resumed_metrics
        if self._validates(step) and "time/val" not in recorded:
            metrics = metrics | self._validate(step)
        if metrics:
            self._log(step, metrics)
        self.snapshots.make_up(step, self._wandb_id, scored="time/eval" in recorded)
        assert self.resumed_from is not None
        self.checkpointer.make_up_weights(self.resumed_from)

    def _save(self, step: int, metrics: Metrics) -> Metrics:
        """Write the checkpoint of `step`; `metrics` are those of the step."""
        self.beat(Phase.CHECKPOINT)
        start = time.perf_counter()
        state = self.state.state_dict() | {
            "wandb_id": self._wandb_id,
            "metrics": {name: json_value(value) for name, value in metrics.items()},
        }
        self.checkpointer.save(step, self.state.tensors(), state)
        return {"time/save_ckpt": time.perf_counter() - start}

    def _saves(self, step: int) -> bool:
        if self.config.ckpt is None:
            return False
        return self.checkpointer.due(step) or step == self.plan.steps or self.stopping

    @property
    def _wandb_id(self) -> str | None:
        return self.monitors.wandb_id if self.monitors else None

    def _validates(self, step: int) -> bool:
        val = self.config.val
        if val is None:
            return False
        at_interval = val.interval is not None and step % val.interval == 0
        return at_interval or (val.eval_on_end and step == self.plan.steps)

    def _validate(self, step: int) -> Metrics:
        """Score the held-out sets; nothing when a stop is asked for before all are scored."""
        assert self.validation is not None
        start = time.perf_counter()
        metrics = None
        if not self.stopping:
            on_progress = partial(self.monitors.show_part, "validation") if self.monitors else None
            votes = StopVotes(self.mesh, lambda: self.run_info.stop.requested)
            leave = self.run_info.heartbeat.before(votes.cast, Phase.VALIDATION)
            metrics = self.validation.run(self.model, on_progress, leave=leave, step=step)
            self.stopping |= votes.settle()
        if metrics is None:
            left_to = "the resumed run" if self.config.ckpt is not None else "nobody: there is no [ckpt]"
            log.info("stopping: the validation of step %d is left to %s", step, left_to)
            return {}
        return {**metrics, "time/val": time.perf_counter() - start}

    def _learning_rate(self, step: int) -> float:
        start = self.state.progress.schedule_start
        return learning_rate(
            self.config.scheduler, peak=self.config.optim.lr, step=step - start, total_steps=self.plan.steps - start
        )

    def _log(self, step: int, metrics: Metrics) -> None:
        if self.monitors is not None:
            self.beat(Phase.MONITORS)
            self.monitors.log(step, metrics)

    def _first_weights(self) -> str | None:
        """Weights from one source: checkpoint, files or init. Gives the wandb run to go on with."""
        config = self.config
        found = find_first(config.resume, self.run_info.dir, self.checkpointer.find_place)
        if found is None:
            set_first_weights(config.model, self.model, self.grad_sync, self.mesh, folder=self.model_folder)
            return None
        place, path = found
        self.resumed_from, self.skips = path, skips_of(config.resume, config.ckpt, is_own=place.is_own)
        check_resumed(config.model, self.adapters, read_state(path), path)
        if self.adapters is not None:
            load_frozen_weights(self.model, self.grad_sync, self.mesh, folder=self.model_folder)
        saved = self._restore(path)
        self.resumed_metrics = {name: math.nan if value is None else value for name, value in saved["metrics"].items()}
        whole = config.model.takes_weights_of_name and self.adapters is None
        unused = f"; those of {config.model.name} are not loaded" if whole else ""
        log.info("weights: from checkpoint %s, after step %d%s", path, self.state.progress.step, unused)
        return saved["wandb_id"] if place.is_own else None

    def _restore(self, path: Path) -> dict[str, Any]:
        # `ckpt.skip_*` is about the checkpoint that the run was resumed from, also when it goes back to that one.
        skips = self.skips if path == self.resumed_from else CheckpointConfig()
        return self.state.restore(self.checkpointer, path, skips)

    def _go_back(self, report: StepReport) -> int:
        """Return to the last checkpoint and pass over the rows of the bad steps, or end the run."""
        guard = self.state.guard
        first_bad = guard.first_bad
        assert first_bad is not None
        bad = f"steps {first_bad + 1} to {report.step + 1}"
        reason = f"{bad} were all skipped: loss or gradient not finite, or no loss token"
        self.beat(Phase.CHECKPOINT)
        self.checkpointer.wait()
        if report.verdict == "stop":
            raise RunError(f"{reason} (nan_guard.max_consecutive reached, no nan_guard.max_rewinds left)")
        try:
            path = self.checkpointer.find(self.run_info.dir, at_most=report.step + 1)
        except RunError as error:
            raise RunError(f"{reason}, and there is no checkpoint to go back to") from error
        self.grad_sync.clear_gradients()
        counters = guard.state_dict()
        self._restore(path)
        guard.load_state_dict(counters)
        guard.rewound()
        step = self.state.progress.step
        self.snapshots.go_on_from(step)
        if self.monitors is not None:
            self.monitors.rewind(step)
        self.loader.skip(max(first_bad, step), report.step)
        log.warning("%s; back to %s, passing over their rows", reason, path.name)
        return step

    def _finish(self, step: int, first_step: int) -> None:
        self.beat(Phase.ENDING)
        self.checkpointer.wait()
        self.beat(Phase.DONE if step == self.plan.steps else Phase.STOPPED)
        if step == self.plan.steps:
            log.info("done: %d steps" if step > first_step else "nothing to do: the run has its %d steps already", step)
            return
        if self.config.ckpt is not None:
            kept = f"checkpoint at step {step} is written; go on with [resume]"
        else:
            kept = "no [ckpt]: lost" if step > first_step else "nothing is lost"
        log.info("stopped on request after step %d of %d: %s", step, self.plan.steps, kept)

    def close(self) -> None:
        """End all threads."""
        self.close_monitors(exit_code=0)
        self.loader.close()
        self.checkpointer.close()

    def close_monitors(self, exit_code: int) -> None:
        """Write out the metrics that are pending."""
        if self.monitors is not None:
            self.monitors.close(exit_code)
