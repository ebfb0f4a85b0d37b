"""Scoring without training: the parts of a run that validation needs, and no other."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from configs.checkpoint import ResumeConfig
from configs.sft import SFTConfig
from trainer.adapters import adapter_record, check_resumed
from trainer.checkpoint import Checkpointer, read_state
from trainer.checkpoint.agreement import agree
from trainer.data.chat.build import chat_tools
from trainer.data.row import untracked
from trainer.heartbeat import Phase
from trainer.model_setup import build_parallel_model, load_frozen_weights, make_deterministic, set_first_weights
from trainer.monitors import EvalMonitors, open_eval_monitors
from trainer.parallel.mesh import Mesh, build_mesh
from trainer.parallel.stop_votes import StopVotes
from trainer.preflight import prepare_model
from trainer.report import Metrics, parameter_counts
from trainer.run import Run
from trainer.state import model_tensors
from trainer.validation import build_validation

log = logging.getLogger(__name__)


class Evaluator:
    """A model that is only scored: without optimizer, training data and gradients. All of it but `notes` is collective:
    every rank takes part."""

    def __init__(self, config: SFTConfig, run_dir: Path, mesh: Mesh) -> None:
        """Build the model, without its weights, and what it is scored on.

        Args:
            config: one that trains nothing (`max_steps = 0`), with [val]. With [resume] the weights will be those that
                a run left (`load`), without it those of `model.name` or drawn ones (`set_first_weights`).
            run_dir: scores of single documents go to its folder `val`, where the config asks for them.
            mesh: the ranks that share the work.

        Raises:
            ConfigError: what the config points to cannot be used.
            RunError: the weights beside adapters cannot be loaded.
        """
        assert config.val is not None, "SFTConfig.run_faults asks for it"
        if config.deterministic:
            make_deterministic()
        inputs = prepare_model(config)
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
        if config.resume is not None and self._adapters is not None:
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
        agree(self._mesh, lambda: check_resumed(self._config.model, self._adapters, read_state(path), path))
        step = self._checkpoints.load(path, model_tensors(self._grad_sync), ignore=("optimizer.",))
        self._grad_sync.publish()
        log.info("weights: from %s, after step %d", path, step)
        return step

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
    run.heartbeat.beat(Phase.LOADING)
    mesh = build_mesh(config.deployment.timeout_seconds, dp_replicate=config.dp_replicate, cp=config.model.cp)
    evaluator = Evaluator(config, run.dir, mesh)
    step, is_own, wandb_id = 0, False, None
    if config.resume is None:
        evaluator.set_first_weights()
    else:
        path = evaluator.find(run.dir, config.resume)
        step = evaluator.load(path)
        is_own = path.resolve().is_relative_to(run.dir.resolve())
        wandb_id = read_state(path)["wandb_id"] if is_own else None
    monitors = open_eval_monitors(config, run.dir, wandb_id) if mesh.rank == 0 else None
    try:
        _score(evaluator, run, mesh, monitors, step, is_own=is_own)
    except BaseException:
        # Nothing here may wait for other ranks, as in `train`.
        if monitors is not None:
            monitors.close(exit_code=1)
        raise
    if monitors is not None:
        monitors.close()


def _score(
    evaluator: Evaluator, run: Run, mesh: Mesh, monitors: EvalMonitors | None, step: int, *, is_own: bool
) -> None:
    for note in evaluator.notes:
        log.info(note)
    on_progress = None if monitors is None else partial(monitors.show_part, "validation")
    start = time.perf_counter()
    votes = StopVotes(mesh, lambda: run.stop.requested)
    leave = run.heartbeat.before(votes.cast, Phase.VALIDATION)
    metrics = evaluator.score(step, leave=leave, on_progress=on_progress)
    votes.settle()
    run.heartbeat.beat(Phase.STOPPED if metrics is None else Phase.DONE)
    if metrics is None:
        log.info("stopped on request before all was scored: nothing is recorded; start again for the whole")
        return
    seconds = time.perf_counter() - start
    record: Metrics = {**metrics}
    if not is_own:
        # Not beside a training's own record: going on from this step, it would take its own round for done.
        record |= parameter_counts(evaluator.model) | {"time/val": seconds}
    if monitors is not None:
        monitors.log(step, record)
    log.info("done: scored in %.1f s; recorded at step %d in %s", seconds, step, run.dir / "metrics.jsonl")
