"""Scoring without training: the parts of a run that validation needs, and no other."""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from configs.checkpoint import ResumeConfig
from configs.sft import SFTConfig
from configs.validation import SuiteConfig, ValConfig
from trainer.adapters import adapter_record, check_resumed
from trainer.checkpoint import Checkpointer, read_state
from trainer.checkpoint.agreement import agree
from trainer.checkpoint.manifest import read_manifest
from trainer.data.chat.build import chat_tools
from trainer.data.row import untracked
from trainer.model_setup import build_parallel_model, load_frozen_weights, make_deterministic, set_first_weights
from trainer.monitors import LateMonitors, Monitors, build_monitors, open_late_monitors
from trainer.parallel.mesh import Mesh, build_mesh
from trainer.parallel.stop_votes import StopVotes
from trainer.preflight import prepare_model
from trainer.run import Run
from trainer.state import model_tensors
from trainer.validation import build_validation

log = logging.getLogger(__name__)


def scoring_config(config: SFTConfig, suite: SuiteConfig | None) -> SFTConfig:
    """The config that scores the model of a training run, on its own `[val]` or on another suite.

    Args:
        config: of the run.
        suite: in place of the run's `[val]`; None: that.
    """
    changes: dict[str, object] = {"max_steps": 0, "resume": None}
    if suite is not None:
        changes["val"] = ValConfig(**{name: getattr(suite, name) for name in SuiteConfig.model_fields})
    return config.model_copy(update=changes)


class Evaluator:
    """A model that is only scored: without optimizer, training data and gradients. All of it but `notes` is collective:
    every rank takes part."""

    def __init__(self, config: SFTConfig, run_dir: Path, mesh: Mesh, *, from_checkpoints: bool) -> None:
        """Build the model, without its weights, and what it is scored on.

        Args:
            config: one that trains nothing (`max_steps = 0`, see `scoring_config`), with [val].
            run_dir: scores of single documents go to its folder `val`, where the config asks for them.
            mesh: the ranks that share the work.
            from_checkpoints: the weights will be those that a run of this config has left (`load`), whose vocabulary
                has grown where the tokenizer asked for it. Otherwise they are those of `model.name`, as they are, or
                drawn (`set_first_weights`).

        Raises:
            ConfigError: what the config points to cannot be used.
            RunError: the weights beside adapters cannot be loaded.
        """
        assert config.val is not None, "SFTConfig.run_faults asks for it"
        if config.deterministic:
            make_deterministic()
        inputs = prepare_model(config, as_stored=not from_checkpoints)
        self._config, self._mesh = config, mesh
        self._folder = inputs.model_folder
        self.model, self._grad_sync = build_parallel_model(
            config.model, inputs.model_config, seq_len=config.longest_row, mesh=mesh
        )
        self._checkpoints = Checkpointer(run_dir, None, mesh)
        self._adapters = adapter_record(config.model, inputs.model_folder)
        validation = build_validation(
            config.val,
            tokenizer=inputs.tokenizer,
            vocab_size=inputs.model_config.vocab_size,
            mesh=mesh,
            pin_memory=mesh.device.type == "cuda",
            chats=chat_tools(config, inputs.tokenizer, untracked),
            cache_dir=config.val_cache,
            arrays_dir=run_dir / "val" if config.val.save_arrays else None,
        )
        assert validation is not None, "there is a suite"
        self._validation = validation
        if from_checkpoints and self._adapters is not None:
            if config.model.takes_weights_of_name:
                load_frozen_weights(self.model, self._grad_sync, mesh, folder=inputs.model_folder)
            else:  # model.debug.random_init
                self.set_first_weights()

    @property
    def notes(self) -> list[str]:
        """What to tell the user once about what is scored."""
        return self._validation.notes

    def find(self, run_dir: Path, resume: ResumeConfig) -> Path:
        """The checkpoint that [resume] names, with whole content.

        Args:
            run_dir: where it is looked for unless `resume` names another run.

        Raises:
            RunError: there is none, or the one asked for is missing or damaged.
        """
        return self._checkpoints.find(resume.dir or run_dir, step=resume.step)

    def load(self, path: Path) -> int:
        """Put the weights of a checkpoint or snapshot in. Gives its step.

        Args:
            path: its folder; written by any number of ranks.

        Raises:
            ConfigError: it is of a model with other adapters.
            RunError: it is damaged, or of another model.
        """
        step = agree(self._mesh, lambda: self._check(path))[0]
        self._checkpoints.load(path, model_tensors(self._grad_sync), ignore=("optimizer.",))
        self._grad_sync.publish()
        log.info("weights: from %s, after step %d", path, step)
        return step

    def _check(self, path: Path) -> int:
        check_resumed(self._config.model, self._adapters, read_state(path), path)
        return int(read_manifest(path)["step"])

    def set_first_weights(self) -> None:
        """Put the weights of `model.name` in, or draw them.

        Raises:
            RunError: they cannot be loaded.
        """
        set_first_weights(self._config.model, self.model, self._grad_sync, self._mesh, folder=self._folder)

    def score(
        self,
        step: int,
        *,
        leave: Callable[[], bool] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, float] | None:
        """Score the weights on everything.

        Args:
            step: of the weights; names the files with the scores of single documents.
            leave, on_progress: see `Validation.run`.

        Returns:
            the metrics by name; None if the round was left.

        Raises:
            RunError: a row cannot be read, or nothing of a set may be scored.
        """
        return self._validation.run(self.model, on_progress, leave=leave, step=step)


def evaluate(config: SFTConfig, run: Run) -> None:
    """Score what a config with `max_steps = 0` names, and record it. Called in every worker.

    Raises:
        ConfigError: what the config points to cannot be used.
        RunError: the scoring failed for a reason that can be named.
    """
    mesh = build_mesh(config.deployment.timeout_seconds)
    evaluator = Evaluator(config, run.dir, mesh, from_checkpoints=config.resume is not None)
    step, source = 0, None
    if config.resume is None:
        evaluator.set_first_weights()
    else:
        source = evaluator.find(run.dir, config.resume)
        step = evaluator.load(source)
    monitors = _open_monitors(config, run.dir, step=step, source=source) if mesh.rank == 0 else None
    try:
        _score(evaluator, run, mesh, monitors, step)
    except BaseException:
        # Nothing here may wait for other ranks, as in `train`.
        if monitors is not None:
            monitors.close(exit_code=1)
        raise
    if monitors is not None:
        monitors.close()


def _open_monitors(config: SFTConfig, run_dir: Path, *, step: int, source: Path | None) -> Monitors | LateMonitors:
    """Those of a run of its own; or, where a run's own checkpoint is scored, those that add to the record of it.

    Args:
        source: the checkpoint that is scored, if it is one.
    """
    if source is not None and source.resolve().is_relative_to(run_dir.resolve()):
        return open_late_monitors(config, run_dir, read_state(source).get("wandb_id"))
    return build_monitors(config, run_dir, start_step=step, total_steps=None, wandb_id=None)


def _score(evaluator: Evaluator, run: Run, mesh: Mesh, monitors: Monitors | LateMonitors | None, step: int) -> None:
    on_progress = None
    if monitors is not None:
        on_progress = partial(monitors.show_part, "validation")
        for note in evaluator.notes:
            monitors.say(note)
    start = time.perf_counter()
    votes = StopVotes(mesh, lambda: run.stop.requested)
    metrics = evaluator.score(step, leave=votes.cast, on_progress=on_progress)
    votes.settle()
    if metrics is None:
        log.info("stopped on request before all was scored: nothing is recorded; start again for the whole")
        return
    seconds = time.perf_counter() - start
    if isinstance(monitors, LateMonitors):
        # Without `time/val` or `time/eval`: a training that goes on from this step would take its own round for done.
        monitors.log(step, metrics)
    elif monitors is not None:
        counts = {f"params/{name}": count for name, count in asdict(evaluator.model.count_parameters()).items()}
        monitors.log(step, {**counts, **metrics, "time/val": seconds})
    log.info("done: scored in %.1f s; recorded at step %d in %s", seconds, step, run.dir / "metrics.jsonl")
