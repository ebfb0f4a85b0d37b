"""Checks that need more than one table, or the disk. Each gives the faults it finds, at full keys.

They run when a command line is resolved, before anything is spawned; not when a config is read back from its JSON.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from configs.checkpoint import CheckpointConfig, EvalSnapshotsConfig, ResumeConfig
from configs.data import ChatConfig, DataConfig, NoDataConfig, TokensDataConfig, is_dataset_id
from configs.errors import Fault
from configs.launch import DeploymentConfig, MultiNodeConfig, RunConfig, SlurmConfig
from configs.model import ModelConfig, is_hub_id
from configs.optim import AdamWConfig, ConstantSchedulerConfig, SchedulerConfig
from configs.validation import SET_ENDINGS, SuiteConfig, ValConfig
from configs.values import join_or


def may_start_anew(resume: ResumeConfig | None) -> bool:
    """Whether the first weights may be drawn, or loaded from `model.name`: always, or before there is a checkpoint."""
    return resume is None or (resume.auto and resume.dir is None)


def check_weights(model: ModelConfig, *, resuming: bool, needs_first: bool | None = None) -> list[Fault]:
    """The model is described once, and one thing decides its weights: `model.name`, `[model.init]` or `[resume]`.

    When resuming, the first two only describe the run that is gone on with.

    Args:
        resuming: there is a `[resume]`.
        needs_first: first weights may be needed (see `may_start_anew`). Unset: where nothing is resumed.
    """
    faults = []
    if model.arch is not None and model.name is not None:
        message = (
            f'describes two models: "{model.name}" here and another one in [model.arch]; give only one of them '
            '("None" takes back what an earlier file gave)'
        )
        faults.append(Fault(key="model.name", message=message))
    if model.arch is None and model.name is None:
        message = (
            'is missing: a table that describes the model, for example model_type = "llama" and its sizes; or give '
            "model.name, a Hugging Face model"
        )
        faults.append(Fault(key="model.arch", message=message))
    if model.name is not None and not is_hub_id(model.name):
        faults += check_folder("model.name", Path(model.name))
    if resuming and model.debug.random_init:
        message = "leaves the weights undefined, and [resume] loads them; give only one of them"
        faults.append(Fault(key="model.debug.random_init", message=message))
    needed = not resuming if needs_first is None else needs_first
    if needed and model.name is None and model.init is None and not model.debug.random_init:
        message = "is missing: nothing says where the weights come from; [model.init] draws them, [resume] loads them"
        faults.append(Fault(key="model.init", message=message))
    return faults


def check_deployment(deployment: DeploymentConfig, model: ModelConfig, *, has_slurm: bool) -> list[Fault]:
    """Something starts the processes, and the replicas are said once."""
    faults = []
    if isinstance(deployment, MultiNodeConfig):
        if not has_slurm:
            message = '"multi_node" needs [slurm], which finds the machines and starts the run on each'
            faults.append(Fault(key="deployment.type", message=message))
        group = deployment.nodes_per_fsdp_group
        if group is not None and model.dp_replicate > 1:
            message = "says the same as deployment.nodes_per_fsdp_group; give only one of them"
            faults.append(Fault(key="model.dp_replicate", message=message))
    elif has_slurm and deployment.num_train_gpus is None and deployment.gpus_per_node is None:
        message = "is missing: how many GPUs the job asks for cannot be seen from here"
        faults.append(Fault(key="deployment.num_train_gpus", message=message))
    return faults


def check_requeue(slurm: SlurmConfig | None, ckpt: CheckpointConfig | None, *, only_scores: bool) -> list[Fault]:
    """A job that is queued again has something to go on from, or it would do the same work for ever."""
    if slurm is None or not slurm.requeue or (ckpt is not None and not only_scores):
        return []
    missing = "with max_steps = 0 nothing is kept between two starts" if only_scores else "there is no [ckpt]"
    return [Fault(key="slurm.requeue", message=f"{missing}: the job would begin anew each time; leave it out")]


def check_layout(model: ModelConfig, *, dp_replicate: int, ranks: int | None) -> list[Fault]:
    """The ranks make up whole replicas, and those whole groups that share rows.

    Args:
        dp_replicate: replicas of the weights.
        ranks: None where it is not known yet; then only what holds for any number is checked.
    """
    faults = []
    if ranks is not None and ranks % (dp_replicate * model.cp):
        sizes = {"replicas": dp_replicate, "shares of a row": model.cp}
        groups = " x ".join(f"{size} {name}" for name, size in sizes.items() if size > 1)
        workers = "1 worker is" if ranks == 1 else f"{ranks} workers are"
        message = f"{workers} not a multiple of {groups}"
        faults.append(Fault(key="model.dp_replicate" if model.dp_replicate > 1 else "model.cp", message=message))
    if model.defer_replicate_sync and dp_replicate == 1:
        message = "needs replicas to add up over: set model.dp_replicate above 1, or leave it out"
        faults.append(Fault(key="model.defer_replicate_sync", message=message))
    return faults


def check_ranks(model: ModelConfig, data: DataConfig, *, dp_replicate: int, ranks: int | None) -> list[Fault]:
    """The ranks fit the layout, and each gets whole micro-batches. Arguments as in `check_layout`."""
    faults = check_layout(model, dp_replicate=dp_replicate, ranks=ranks)
    if any(fault.key != "model.defer_replicate_sync" for fault in faults):
        return faults
    if ranks is not None and data.batch_size % (data.micro_batch_size * ranks // model.cp):
        shared = "" if model.cp == 1 else f", {model.cp} of which share each row"
        message = (
            f"{data.batch_size} is not a multiple of data.micro_batch_size x data-parallel ranks = "
            f"{data.micro_batch_size} x {ranks // model.cp} ({ranks} workers{shared})"
        )
        faults.append(Fault(key="data.batch_size", message=message))
    elif ranks is not None and ranks > 1 and model.optimization_dtype == "bfloat16":
        deferred = model.defer_grad_sync or model.defer_replicate_sync
        if not deferred and data.batch_size * model.cp > data.micro_batch_size * ranks:
            message = (
                '"bfloat16" above one rank would add up the gradients of micro-batches in bfloat16: set '
                "model.defer_grad_sync, which adds them up in model.reduce_dtype, or take one micro-batch per step"
            )
            faults.append(Fault(key="model.optimization_dtype", message=message))
    if ranks == 1 and model.fsdp_cpu_offload:
        message = "needs more than one rank: at one there is no FSDP; model.optim_cpu_offload works there"
        faults.append(Fault(key="model.fsdp_cpu_offload", message=message))
    return faults


def check_moments(model: ModelConfig, optim: AdamWConfig) -> list[Fault]:
    """Moments in bfloat16 can change: an update by less than 1/256 of a moment would be rounded away, and an old
    second moment never fade."""
    slowest = 1 - 2**-8
    if model.optimization_dtype != "bfloat16" or max(optim.betas) <= slowest:
        return []
    message = (
        f'{max(optim.betas):g} is above {slowest:.3f}: moments in model.optimization_dtype = "bfloat16" have 8 bits, '
        "and would not fade at that rate"
    )
    return [Fault(key="optim.betas", message=message)]


def check_shares(model: ModelConfig, lengths: Mapping[str, Sequence[int]]) -> list[Fault]:
    """Rows can be cut into equal shares for context parallelism.

    Args:
        lengths: of rows, by the key that gives them.
    """
    pieces = model.cp * (2 if model.cp_style == "ring" else 1)
    why = "model.cp" if model.cp_style == "ulysses" else "2 x model.cp"
    return [
        Fault(key=key, message=f"{length} is not a multiple of {why} = {pieces}: the ranks' shares would differ")
        for key, of_key in lengths.items()
        for length in of_key
        if model.cp > 1 and length % pieces
    ]


def check_schedule(scheduler: SchedulerConfig, *, lr: float, total_steps: int | None) -> list[Fault]:
    """The phases fit into the run, and the rate falls.

    Args:
        lr: peak learning rate.
        total_steps: steps of the run; None while only `data.max_epochs` bounds it, then only fractions are checked.
    """
    if isinstance(scheduler, ConstantSchedulerConfig):
        return []
    faults = []
    phases = scheduler.phases()
    names = " + ".join(phases)
    given = " + ".join(f"{length}" for length in phases.values())
    # The last phase that was asked for is the one that does not fit any more.
    key = f"scheduler.{[name for name, length in phases.items() if length or name == 'warmup_steps'][-1]}"
    if total_steps is None:
        if sum(length for length in phases.values() if length < 1) > 1:
            faults.append(Fault(key=key, message=f"{names} = {given} is more than the whole run"))
    elif sum(length * total_steps if length < 1 else length for length in phases.values()) > total_steps:
        message = f"{names} = {given} is longer than the run of {total_steps} steps"
        faults.append(Fault(key=key, message=message))
    if scheduler.min_lr > lr:
        faults.append(Fault(key="scheduler.min_lr", message=f"{scheduler.min_lr} is above the peak, optim.lr = {lr}"))
    return faults


def check_resume(
    resume: ResumeConfig | None, run: RunConfig, *, clean: bool, max_steps: int | None, counts_on: bool
) -> list[Fault]:
    """What is resumed can be found, and is not deleted first.

    Args:
        resume: `[resume]`.
        run: `[run]`.
        clean: whether the run directory is emptied first.
        max_steps: steps of the run, None while only the data bounds them.
        counts_on: the step counter goes on from the checkpoint's.
    """
    if resume is None:
        return []
    faults = []
    if clean:
        faults.append(Fault(key="clean", message="would delete what [resume] goes on from; give only one of them"))
    if run.name is None and (resume.auto or resume.dir is None):
        fork = "" if resume.auto else "; or give resume.dir to fork another"
        faults.append(Fault(key="run.name", message=f"is missing: the name of the run to go on with{fork}"))
    if resume.auto and resume.dir is None and resume.step is not None:
        message = f"goes on from step {resume.step}, and resume.auto from the newest; give only one of them"
        faults.append(Fault(key="resume.step", message=message))
    elif resume.dir is None and not counts_on:
        message = "would mix the steps counted anew with this run's checkpoints of old; fork it: give resume.dir"
        faults.append(Fault(key="ckpt.skip_progress", message=message))
    if resume.dir is not None:
        faults += check_folder("resume.dir", resume.dir)
    if counts_on and resume.step is not None and max_steps is not None and resume.step > max_steps:
        faults.append(Fault(key="resume.step", message=f"{resume.step} is past the end, max_steps = {max_steps}"))
    return faults


def check_skips(resume: ResumeConfig | None, ckpt: CheckpointConfig | None, *, requeue: bool) -> list[Fault]:
    """What `ckpt.skip_*` leaves out is left out once, however often the run is started again by itself.

    Args:
        requeue: `slurm.requeue`.
    """
    if resume is None or resume.dir is not None or not (resume.auto or requeue):
        return []
    why = "resume.auto" if resume.auto else "slurm.requeue"
    message = f"would be done at every start that {why} makes of this run's own checkpoints; fork it: give resume.dir"
    skips = ("skip_optimizer", "skip_dataloader", "skip_scheduler")
    return [Fault(key=f"ckpt.{name}", message=message) for name in skips if ckpt is not None and getattr(ckpt, name)]


def check_end(data: DataConfig, *, max_steps: int | None) -> list[Fault]:
    """A training run has data, and an end."""
    if isinstance(data, NoDataConfig):
        message = '"none" has nothing to train on; it goes with max_steps = 0, which only scores the model on [val]'
        return [Fault(key="data.type", message=message)]
    if max_steps is None and data.max_epochs is None:
        message = "is missing: a whole number; or give data.max_epochs for as many steps as the data allows"
        return [Fault(key="max_steps", message=message)]
    return []


def check_rounds(val: ValConfig | None, snapshots: EvalSnapshotsConfig | None) -> list[Fault]:
    """Something says when a training run is validated: `[val]` itself, or `[eval_snapshots]` for `eval-worker`."""
    if val is None or snapshots is not None or val.interval is not None or val.eval_on_start or val.eval_on_end:
        return []
    message = "is missing: nothing says when to validate; set it, eval_on_start or eval_on_end"
    return [Fault(key="val.interval", message=message)]


def check_scoring(val: ValConfig | None, resume: ResumeConfig | None) -> list[Fault]:
    """A run that only scores has something to score, and to score it on."""
    faults = []
    if val is None:
        message = "is missing: with max_steps = 0 nothing is trained, the model is only scored on what this table names"
        faults.append(Fault(key="val", message=message))
    if resume is not None and resume.auto:
        message = "leaves open which weights are scored; with max_steps = 0 give [resume], or leave it out"
        faults.append(Fault(key="resume.auto", message=message))
    return faults


def check_data(data: DataConfig) -> list[Fault]:
    """The training data is there."""
    if isinstance(data, TokensDataConfig):
        return [fault for path in data.paths for fault in _check_exists("data.paths", path)]
    return _check_chats("data.name", data) if isinstance(data, ChatConfig) else []


def check_suite(suite: SuiteConfig | None) -> list[Fault]:
    """What `[val]` names is there."""
    if suite is None:
        return []
    faults = [] if suite.data is None else _check_chats("val.data.name", suite.data)
    no_folder = [] if suite.data_dir is None else check_folder("val.data_dir", suite.data_dir)
    faults += no_folder
    for entry in suite.sets:
        if not isinstance(entry, str):
            faults += _check_exists("val.sets", entry.path)
        elif suite.data_dir is not None and not no_folder:
            faults += _check_named_set(suite.data_dir, entry)
    return faults


def _check_named_set(data_dir: Path, name: str) -> list[Fault]:
    missing = [_check_exists("val.sets", data_dir / f"{name}{ending}") for ending in SET_ENDINGS]
    if not all(missing):
        return []
    message = f"{missing[0][0].message}, and there is no {name}{join_or(SET_ENDINGS[1:])} beside it"
    return [Fault(key="val.sets", message=message)]


def _check_chats(key: str, chats: ChatConfig) -> list[Fault]:
    """What can only be a path is there; whether the hub has a dataset is found out when it is read."""
    names = dict.fromkeys(part.name for part in chats.parts)
    return [fault for name in names if not is_dataset_id(name) for fault in _check_exists(key, Path(name))]


def _check_exists(key: str, path: Path) -> list[Fault]:
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:
        return [Fault(key=key, message=f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")]
    return [] if exists else [Fault(key=key, message=f"{path} does not exist")]


def check_folder(key: str, path: Path) -> list[Fault]:
    """The folder is there."""
    faults = _check_exists(key, path)
    return faults or ([] if path.is_dir() else [Fault(key=key, message=f"{path} is not a folder")])
