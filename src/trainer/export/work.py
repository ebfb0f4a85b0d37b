"""From the command line of `export-hf` to the folder."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from configs.errors import ConfigError, Fault
from configs.export import ExportConfig
from trainer.checkpoint import find_checkpoint
from trainer.checkpoint.export import MARK_NAME, Export, check_content, plan_export, write_export
from trainer.checkpoint.folder import FOLDER_NAME
from trainer.checkpoint.manifest import STATE_NAME, STEP_NAME
from trainer.export.merge import Base, Merge, find_base, plan_merge, with_base, write_merged
from trainer.progress import WorkProgress
from trainer.weights.tokenizer_files import TokenizerFiles, read_tokenizer


def export(config: ExportConfig, say: Callable[[str], None]) -> None:
    """Do what the command line says.

    Raises:
        ConfigError: it names no checkpoint, no tokenizer, or a folder that is not to be written.
        RunError: the checkpoint is damaged, or the folder cannot be written.
    """
    path = _find(config, say)
    target = _target(config, path)
    try:
        _check_target(target, clean=config.clean)
    except OSError as error:
        raise ConfigError.one("output_dir", f"{target} cannot be used: {error.strerror}") from error
    plan = plan_export(path, "float32" if config.merge else config.dtype)
    tokenizer = _tokenizer(config, plan)
    base = _base(config, plan, say)
    merge = plan_merge(plan, base, config.dtype) if config.merge and base is not None else None
    whole = plan if merge is None else merge.whole
    say(f"export: {path}, {_content(plan, merge)}, {whole.num_bytes:,} bytes in {whole.dtype}")
    check_content(plan)
    with closing(WorkProgress(description="export", total=whole.num_bytes, unit="MB", say=say)) as progress:
        write = partial(write_export, with_base(plan, base)) if merge is None else partial(write_merged, merge)
        write(target, tokenizer, max_shard_bytes=config.max_shard_bytes, on_progress=progress.update)
    if tokenizer is None:
        say("the run had no tokenizer, so none is written; --tokenizer.name adds one")
    say(f"written: {target}")


def _find(config: ExportConfig, say: Callable[[str], None]) -> Path:
    """The checkpoint that the command line names.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    given = config.checkpoint
    if (given / MARK_NAME).exists():
        raise ConfigError.one("checkpoint", f"{given} is an export already, a Hugging Face folder, and no checkpoint")
    if (given / STATE_NAME).exists() or STEP_NAME.fullmatch(given.resolve().name):
        if config.step is not None:
            raise ConfigError.one("step", f"{given} is a checkpoint already; give --step with a run directory")
        return given
    run_dir = given.resolve().parent if given.resolve().name == FOLDER_NAME else given
    if not (run_dir / FOLDER_NAME).is_dir():
        message = f"{given} is neither a checkpoint (it has no {STATE_NAME}) nor a run with a folder {FOLDER_NAME}"
        raise ConfigError.one("checkpoint", message)
    try:
        # The run may be alive.
        return find_checkpoint(run_dir, config.step, say, repair=False)
    except ConfigError as error:
        faults = [Fault(key="checkpoint" if config.step is None else "step", message=f.message) for f in error.faults]
        raise ConfigError(faults) from error


def _target(config: ExportConfig, path: Path) -> Path:
    if config.output_dir is not None:
        return config.output_dir
    # As it was given where that names the run: messages should say the folder as the user does. `.` does not, nor
    # does `step_9` typed beside it.
    place = path if path.parent.name == FOLDER_NAME else path.resolve()
    if place.parent.name != FOLDER_NAME:
        message = f"is needed: {path} lies in no run directory, where exports go by default"
        raise ConfigError.one("output_dir", message)
    return place.parent.parent / "exports" / (place.name + "_merged" * config.merge)


def _base(config: ExportConfig, plan: Export, say: Callable[[str], None]) -> Base | None:
    """The base of the checkpoint's adapters, where it is asked for.

    Raises:
        ConfigError: the checkpoint holds no adapters, or their base is missing or another one.
    """
    if not config.merge and config.base is None:
        return None
    if plan.record.adapters is None:
        key = "merge" if config.merge else "base"
        raise ConfigError.one(key, f"{plan.path} holds a whole model, no adapters that could have a base")
    return find_base(plan.record.adapters, config.base, say)


def _content(plan: Export, merge: Merge | None) -> str:
    adapters = plan.record.adapters
    if adapters is None:
        return f"{plan.num_params:,} parameters"
    if merge is None:
        return f"adapters of {adapters.base}, {plan.num_params:,} parameters"
    return f"adapters merged with {merge.base.name}, {merge.whole.num_params:,} parameters"


def _check_target(target: Path, *, clean: bool) -> None:
    """Only an empty folder may be written into, or with `clean` one that this command made.

    Raises:
        ConfigError: it is something else.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ConfigError.one("output_dir", f"{target} is {'a link' if target.is_symlink() else 'not a folder'}")
    if target.name in ("", ".."):
        raise ConfigError.one("output_dir", f"{target} names no folder of its own")
    if not target.exists() or not any(target.iterdir()):
        return
    if not clean:
        raise ConfigError.one("output_dir", f"{target} is not empty: give another, or --clean to replace it")
    if not (target / MARK_NAME).is_file():
        raise ConfigError.one("clean", f"{target} holds no {MARK_NAME}, so it is not an export of ours: not replaced")


def _tokenizer(config: ExportConfig, plan: Export) -> TokenizerFiles | None:
    """The tokenizer asked for, or else the run's.

    Raises:
        ConfigError: it cannot be read, or has more ids than the model.
    """
    name = config.tokenizer.name or plan.record.tokenizer
    if name is None:
        return None
    try:
        tokenizer = read_tokenizer(name)
    except ConfigError as error:
        if config.tokenizer.name is not None:
            raise
        message = f"{error.faults[0].message} (it is that of the run; --tokenizer.name says where it lies now)"
        raise ConfigError.one("tokenizer.name", message) from error
    vocab_size = plan.record.config.get("vocab_size")
    if isinstance(vocab_size, int) and tokenizer.length > vocab_size:
        message = f"{name} has {tokenizer.length} ids, the model only {vocab_size}: it is another model's"
        raise ConfigError.one("tokenizer.name", message)
    return tokenizer
