"""The work of `tokenize` from sources to the finished folder."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.schema import flatten
from configs.tokenize import TokenizeConfig, TrainTokenizerConfig
from trainer.data.shard import ShardError, open_shard
from trainer.errors import RunError
from trainer.progress import WorkProgress
from trainer.tokenize.bpe import train_tokenizer, training_texts
from trainer.tokenize.encoder import Encoder, build_encoder
from trainer.tokenize.heldout import HeldoutRule
from trainer.tokenize.job import Job, TaskProgress, read_result, run_task
from trainer.tokenize.output import Output, open_output
from trainer.tokenize.pool import run_tasks
from trainer.tokenize.readers import Intake, open_hub, read_file, read_task
from trainer.tokenize.report import TaskTotals, summary
from trainer.tokenize.sources import HubDataset, SourceFile, Task, split_tasks
from trainer.tokenize.writer import HELDOUT, TRAIN, TaskCounts

Say = Callable[[str], None]

_NOT_IN_PLAN = {"inputs", "output_dir", "num_tasks", "num_workers", "clean", "bad_documents"}
"""Fields that change nothing in the shards, or that the plan holds in another form. Where a document is bad, either the
work ended there or it was dropped, so finished tasks are the same under both."""

_HUB_FIELDS = ("subset", "split", "revision", "streaming")
"""Fields that mean nothing for files."""


def tokenize(config: TokenizeConfig, files: list[SourceFile], hub: HubDataset | None, say: Say) -> None:
    """Do the work, or the rest of it.

    Raises:
        ConfigError: the inputs, the tokenizer or the output folder do not allow it.
        RunError: it fails for a reason with a name; the same command goes on from the finished tasks.
    """
    start = time.monotonic()
    num_rows = _check_hub(hub, config.num_tasks) if hub is not None else None
    tasks = split_tasks(files, hub, config.num_tasks)
    encoder = build_encoder(config.tokenizer.name) if config.tokenizer.name is not None else None
    plan = _plan(config, files, hub, len(tasks), encoder)
    output, goes_on = open_output(config.output_dir, plan, clean=config.clean, say=say)
    try:
        if encoder is None:
            assert config.tokenizer.train is not None
            folder = output.partial / "tokenizer"
            if not folder.exists() and not output.is_complete:
                _train(config, config.tokenizer.train, files, hub, folder, say)
            name = str(folder if folder.exists() else output.folder / "tokenizer")
            encoder = build_encoder(name, shown_name=output.folder.resolve().name)
        job = Job(
            folder=output.partial.absolute(),
            encoder=encoder,
            heldout=HeldoutRule(fraction=config.heldout.fraction, seed=config.heldout.seed),
            text_key=config.text_key,
            drop_bad=config.bad_documents == "drop",
            shuffle=config.shuffle,
            seed=config.seed,
            tasks=tuple(tasks),
        )
        pending = [task for task in tasks if not job.marker(task.number).exists()]
        if goes_on:
            say(f"going on with unfinished work: {len(tasks) - len(pending)} of {len(tasks)} tasks are done")
        if pending:
            _run(job, pending, output, config.num_workers, num_rows, say)
        _finish(config, job, output, say, start)
    finally:
        output.close()


def _check_hub(hub: HubDataset, num_tasks: int | None) -> int | None:
    """Rows of the dataset, where they are known."""
    try:
        num_shards, num_rows = open_hub(hub)
    except RunError as error:
        message = f"there is no file or folder {hub.name}, and as a Hugging Face dataset it cannot be loaded: {error}"
        raise ConfigError.one("inputs", message) from error
    if num_tasks is not None and 1 < num_shards < num_tasks:
        message = f"the dataset {hub.name} has {num_shards} shards and cannot be split into {num_tasks} tasks"
        raise ConfigError.one("num_tasks", message)
    return num_rows


def _plan(
    config: TokenizeConfig, files: list[SourceFile], hub: HubDataset | None, num_tasks: int, encoder: Encoder | None
) -> dict[str, Any]:
    """All that decides what is written, flat."""
    plan = {"inputs": config.inputs, "num_tasks": num_tasks}
    plan |= flatten(config.model_dump(mode="json", exclude=_NOT_IN_PLAN))
    if encoder is not None:
        plan["tokenizer (contents)"] = encoder.digest
    plan |= {f"input {file.path}": f"{file.size} bytes (time {file.mtime_ns})" for file in files}
    return plan if hub is not None else {key: value for key, value in plan.items() if key not in _HUB_FIELDS}


def _train(
    config: TokenizeConfig,
    train: TrainTokenizerConfig,
    files: list[SourceFile],
    hub: HubDataset | None,
    folder: Path,
    say: Say,
) -> None:
    say(f"training a tokenizer of {train.vocab_size:,} tokens")
    intake = Intake(text_key=config.text_key, drop_bad=config.bad_documents == "drop")
    sources = [read_file(file, intake) for file in files]
    if hub is not None:
        sources = [read_task(Task(number=0, hub=hub, num_tasks=1), intake)]
    # Compressed text may be longer than the files; the bar then stands at its end for a while.
    total = min(train.max_bytes, sum(file.size for file in files)) if files else train.max_bytes
    heldout = HeldoutRule(fraction=config.heldout.fraction, seed=config.heldout.seed)
    with closing(WorkProgress(description="text for the tokenizer", total=total, unit="kB", say=say)) as progress:
        train_tokenizer(train, training_texts(sources, heldout, train.max_bytes, progress.update), folder, say)


def _run(job: Job, pending: Sequence[Task], output: Output, num_workers: int, num_rows: int | None, say: Say) -> None:
    done = {task.number: read_result(job, task.number).counts for task in job.tasks if task not in pending}
    totals = TaskTotals({task.number: task.size for task in job.tasks}, done)
    by_rows = job.tasks[0].hub is not None
    progress = WorkProgress(
        description="tokenize",
        total=num_rows if by_rows else sum(task.size for task in job.tasks),
        unit="documents" if by_rows else "kB",
        done=totals.documents if by_rows else totals.source_bytes,
        say=say,
    )

    def on_progress(part: TaskProgress) -> None:
        totals.update(part)
        progress.update(
            totals.documents if by_rows else totals.source_bytes,
            f"; {totals.documents:,} documents, {totals.tokens:,} tokens",
        )

    try:
        job_file = job.write()
        if num_workers == 1 or len(pending) == 1:
            for task in pending:
                run_task(job, task, on_progress)
        else:
            numbers = [task.number for task in pending]
            run_tasks(job_file, numbers, num_workers=num_workers, lock=output.lock, on_progress=on_progress)
    finally:
        progress.close()


def _finish(config: TokenizeConfig, job: Job, output: Output, say: Say, start: float) -> None:
    results = [read_result(job, task.number) for task in job.tasks]
    counts = TaskCounts()
    for result in results:
        counts.add(result.counts)
    shards = [file for result in results for file in result.files]
    if not counts.train.documents:
        left = f"all {counts.heldout.documents} are held out" if counts.heldout.documents else "there is no document"
        raise RunError(f"no training data: {left} ({counts.empty} without text, {counts.bad} bad rows were dropped)")
    if not output.is_complete:
        _check_shards(job, shards)
    if config.heldout.fraction and not counts.heldout.documents:
        say(f"no document was held out: {counts.train.documents} are too few for heldout.fraction")
    for side in (TRAIN, HELDOUT):
        if not any(file.startswith(f"{side}/") for file in shards) and (output.partial / side).exists():
            (output.partial / side).rmdir()
    tokenizer_files = sorted(f"tokenizer/{path.name}" for path in (output.partial / "tokenizer").glob("*"))
    output.finish(_record(config, job, counts, tokenizer_files + sorted(shards)))
    num_shards = sum(file.endswith(".ds") for file in shards)
    for line in summary(counts, text_key=config.text_key, num_shards=num_shards, seconds=time.monotonic() - start):
        say(line)
    say(f"written: {output.folder}")


def _check_shards(job: Job, files: Sequence[str]) -> None:
    """The files of finished tasks are still there and whole."""
    for file in files:
        if file.endswith(".ds"):
            try:
                open_shard(job.folder / file)
            except ShardError as error:
                raise RunError(f"the finished work is damaged: {error}. --clean starts anew") from error


def _record(config: TokenizeConfig, job: Job, counts: TaskCounts, files: list[str]) -> dict[str, Any]:
    """What tokenize.json says: the same for the same work, so no times."""
    encoder = job.encoder
    return {
        "settings": config.model_dump(mode="json", exclude={"num_workers", "clean", "output_dir"}),
        "tokenizer": {
            "name": encoder.name,
            "vocab_size": encoder.vocab_size,
            "eos_token": encoder.eos_token,
            "eos_id": encoder.eos_id,
            "bytes_per_token": encoder.width,
        },
        "train": vars(counts.train),
        "heldout": vars(counts.heldout),
        "empty": counts.empty,
        "bad": counts.bad,
        "control_texts": counts.control_texts,
        "files": files,
    }
