"""Checks that training and scoring share: the model, what it is validated on, the checkpoint and the weights."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import PretrainedConfig

from configs.checks import may_start_anew
from configs.errors import ConfigError, Fault
from configs.sft import SFTConfig
from models.base import CausalLM
from models.errors import ArchError
from models.registry import build_model
from trainer.adapters import adapter_record, apply_adapters, base_faults, setting_faults
from trainer.checkpoint import ModelRecord, Place, check_fits, find_checkpoint, find_first, find_newest, read_state
from trainer.checkpoint.as_model import is_checkpoint, open_model
from trainer.data.chat.build import chat_tools
from trainer.errors import RunError
from trainer.model_setup import DTYPES, choose_attention
from trainer.model_source import arch_fault
from trainer.parallel.mesh import one_rank_mesh
from trainer.preflight.inputs import ModelInputs
from trainer.progress import ProgressBars
from trainer.state import model_record
from trainer.validation import build_validation
from trainer.weights.fit import check_fit
from trainer.weights.folder import weight_file_names
from trainer.weights.hub import fetch_weights


def check_model(config: SFTConfig, inputs: ModelInputs) -> CausalLM:
    """The model with its adapters, if any, without memory: what an architecture asks for and we lack shows here, not
    on every worker.

    Raises:
        ConfigError: it cannot be built.
    """
    model, lora = _build_on_meta(config, inputs.model_config), config.model.lora
    if lora is None:
        return model
    if inputs.stored_vocab_size != inputs.model_config.vocab_size:
        message = (
            f"the tokenizer of {config.tokenizer_name} has more ids than the {inputs.stored_vocab_size} rows of "
            f"{config.model.name}, and adapters are used with the vocabulary that their base has; give the model's own "
            "tokenizer, or leave [model.lora] out"
        )
        raise ConfigError.one("tokenizer.name", message)
    apply_adapters(lora, model, compute_dtype=DTYPES[config.model.resolved_compute_dtype])
    return model


def share_faults(config: SFTConfig, model: CausalLM) -> Iterator[Fault]:
    """Why rows of the model cannot be shared by `model.cp` ranks."""
    if config.model.cp > 1:
        try:
            model.check_context_parallel(config.model.cp_style, config.model.cp)
        except ArchError as error:
            yield Fault(key="model.cp", message=error.message)


def check_validation(config: SFTConfig, inputs: ModelInputs) -> None:
    """Build what `[val]` asks for, tokenising what is in no cache yet, under a bar.

    Raises:
        ConfigError: it cannot be scored.
    """
    with ProgressBars() as bars:
        build_validation(
            config.val,
            tokenizer=inputs.tokenizer,
            vocab_size=inputs.model_config.vocab_size,
            mesh=one_rank_mesh(torch.device("cpu")),
            pin_memory=False,
            chats=chat_tools(config, inputs.tokenizer, bars.track),
            cache_dir=config.val_cache,
            track=bars.track,
        )


def find_resumed(
    config: SFTConfig, inputs: ModelInputs, run_dir: Path, say: Callable[[str], None]
) -> tuple[Place, Path] | None:
    """The checkpoint that [resume] names, and word of it; None without that table, and for the fresh start of
    resume.auto.

    Args:
        run_dir: where [resume] without dir looks.

    Raises:
        ConfigError: there is none, or the one asked for is missing or damaged.
    """

    def look(place: Place) -> Path | None:
        if place.required:
            return find_checkpoint(place.run_dir, place.step, say, repair=place.is_own)
        return find_newest(place.run_dir, say, repair=place.is_own)

    found = find_first(config.resume, run_dir, look)
    if found is None:
        if config.resume is not None:
            say(f"resume: no whole checkpoint in {run_dir}, so the run starts anew")
        return None
    say(f"resume: from {found[1]}")
    for change in _model_changes(config, found[1], inputs):
        say(change)
    return found


def model_faults(config: SFTConfig, path: Path, model: CausalLM) -> Iterator[Fault]:
    """Why the weights of the whole checkpoint at `path` cannot be put into a model without memory."""
    try:
        others = list(setting_faults(config.model, read_state(path), path))
        yield from others
        if not others:
            # The optimizer's moments have the shapes of these; under FSDP only the workers know which there are.
            trained = {name: tensor for name, tensor in model.canonical_parameters().items() if tensor.requires_grad}
            check_fits(path, {f"model.{name}": tensor for name, tensor in trained.items()}, ("optimizer.",))
    except RunError as error:
        yield Fault(key="resume", message=str(error))


def weight_faults(
    config: SFTConfig, inputs: ModelInputs, found: Path | None, say: Callable[[str], None]
) -> Iterator[Fault]:
    """Why the weights of `model.name` cannot be loaded, where they are needed: from the headers of its files, which are
    fetched for it. Gigabytes: ask last.

    Args:
        found: the checkpoint that is resumed, if any.
    """
    needed = may_start_anew(config.resume) or config.model.lora is not None
    if not needed or not config.model.takes_weights_of_name:
        return
    name, folder = config.model.name, inputs.model_folder
    assert name is not None and folder is not None
    if not is_checkpoint(folder):
        fetch_weights(name, folder, weight_file_names(folder), say)
    faults = list(
        check_fit(open_model(folder), _build_on_meta(config, inputs.whole_config), vocab_size=inputs.stored_vocab_size)
    )
    yield from faults
    if not faults and found is not None:
        yield from base_faults(adapter_record(config.model, folder), read_state(found), found)


def _build_on_meta(config: SFTConfig, model_config: PretrainedConfig) -> CausalLM:
    # Where jobs are submitted there need be no GPU; the nodes have them.
    on_gpu = torch.cuda.is_available() or config.slurm is not None
    device = torch.device("cuda" if on_gpu else "cpu")
    attn = choose_attention(config.model.attn, device, DTYPES[config.model.resolved_compute_dtype])
    try:
        with torch.device("meta"):
            dtype, impl = DTYPES[config.model.optimization_dtype], config.model.impl
            model = build_model(model_config, seq_len=config.longest_row, attn=attn, dtype=dtype, impl=impl)
        if config.model.init is not None:
            model.init_rules()  # a model of transformers may have none
        return model
    except ArchError as error:
        raise arch_fault(config, error) from error


def _model_changes(config: SFTConfig, path: Path, inputs: ModelInputs) -> Iterator[str]:
    """In what the run's model differs from the checkpoint's although the weights fit: a longer RoPE may be meant, a
    folder of `model.name` that changed meanwhile is not."""
    own = model_record(config, inputs.model_config, has_tokenizer=inputs.tokenizer is not None)
    try:
        saved = ModelRecord.of(read_state(path))
    except RunError as error:
        yield f"model: not compared with that of the checkpoint: {error}"
        return
    for key, (then, now) in saved.changes(own).items():
        yield f"model: {key} is {json.dumps(now)}, and {json.dumps(then)} in the checkpoint"
