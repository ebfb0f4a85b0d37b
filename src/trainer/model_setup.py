"""From `[model]` to a model on its device: meta build, activation checkpointing, compile, data parallelism, memory,
first weights."""

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from configs.errors import ConfigError
from configs.model import ModelConfig
from models.base import CausalLM
from models.init import init_weights
from models.layers.context_parallel.base import ContextParallel, CpStyle
from models.layers.context_parallel.ring import Ring
from models.layers.context_parallel.ulysses import Ulysses
from models.lora import adapter_rules
from models.registry import build_model
from trainer.adapters import apply_adapters
from trainer.checkpoint.agreement import agree
from trainer.checkpoint.as_model import open_model
from trainer.parallel.data_parallel import GradSync, apply_data_parallel
from trainer.parallel.mesh import Mesh
from trainer.pinned import pinned_zeros
from trainer.weights.load import load_weights

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

_CONTEXT_PARALLEL: dict[CpStyle, Callable[[dist.ProcessGroup], ContextParallel]] = {"ulysses": Ulysses, "ring": Ring}

_DEBUG_VALUE = 0.01
_IMPLEMENTATIONS = {"custom": "implemented here", "hf": "transformers' own, with attention inside documents"}


def make_deterministic() -> None:
    """Let this process use kernels alone that give the same bits every time."""
    # cuBLAS reads it when its first handle is made; without it the flag below would refuse every product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def build_parallel_model(
    config: ModelConfig, model_config: PretrainedConfig, *, seq_len: int, mesh: Mesh
) -> tuple[CausalLM, GradSync]:
    """The model in its data-parallel form, with memory but without values.

    Args:
        seq_len: the longest row it will see.

    Raises:
        models.errors.ArchError: the architecture asks for something that is not implemented.
        ConfigError: `[model.lora]` asks for something that cannot be adapted.
    """
    compute_dtype = DTYPES[config.resolved_compute_dtype]
    attn = choose_attention(config.attn, mesh.device, compute_dtype)
    with torch.device("meta"):
        dtype = DTYPES[config.optimization_dtype]
        model = build_model(model_config, seq_len=seq_len, attn=attn, dtype=dtype, impl=config.impl)
    if mesh.cp_group is not None:
        model.check_context_parallel(config.cp_style, mesh.cp_size)
        model.share_rows(_CONTEXT_PARALLEL[config.cp_style](mesh.cp_group))
    if config.lora is not None:
        apply_adapters(config.lora, model, compute_dtype=compute_dtype)
    if config.ac is not None:
        model.apply_activation_checkpointing(config.ac.mode, config.ac.freq)
    if config.ac_offloading is not None:
        model.offload_activations(
            max_inflight=config.ac_offloading.max_inflight_activations,
            device=mesh.device,
            allocate=partial(_host_bytes, pin=mesh.device.type == "cuda"),
        )
    if config.compile is not None:
        model.compile_blocks(config.compile.mode, config.compile.fullgraph)
    grad_sync = apply_data_parallel(
        model,
        mesh,
        compute_dtype=compute_dtype,
        reduce_dtype=DTYPES[config.resolved_reduce_dtype],
        reshard_after_forward=config.reshard_after_forward,
        defer_grad_sync=config.defer_grad_sync,
        defer_replicate_sync=config.defer_replicate_sync,
        cpu_offload=config.fsdp_cpu_offload,
    )
    grad_sync.materialize(mesh.device)
    log.info('model: %s, %s (model.impl = "%s")', model_config.model_type, _IMPLEMENTATIONS[model.impl], config.impl)
    log.info("attention %s, compute in %s, master weights in %s", attn, compute_dtype, config.optimization_dtype)
    if mesh.cp_group is not None:
        log.info("context parallelism: %d ranks share each row, %s attention", mesh.cp_size, config.cp_style)
    return model, grad_sync


def _host_bytes(num_bytes: int, *, pin: bool) -> Tensor:
    return pinned_zeros((num_bytes,), torch.uint8, pin=pin)


def set_first_weights(
    config: ModelConfig, model: CausalLM, grad_sync: GradSync, mesh: Mesh, *, folder: Path | None
) -> None:
    """Load or draw the weights of a run that does not resume; the log says which. Collective.

    Args:
        folder: of `model.name`, None when the model is described by `[model.arch]`.

    Raises:
        RunError: on every rank, when the weights cannot be loaded on any.
    """
    tensors = grad_sync.masters | grad_sync.frozen
    init = config.init
    if config.debug.random_init:
        for tensor in tensors.values():
            tensor.fill_(_DEBUG_VALUE)
        log.warning(
            "weights: neither loaded nor drawn, all parameters are %g (model.debug.random_init): this run is for speed "
            "only, its losses mean nothing",
            _DEBUG_VALUE,
        )
    elif init is not None:
        parameters = {name: grad_sync.as_global(name, tensor) for name, tensor in tensors.items()}
        init_weights(parameters, std=init.std, seed=init.seed, rules=model.init_rules())
        log.info("weights: drawn from [model.init], std %g, seed %d", init.std, init.seed)
    else:
        rules = {} if config.lora is None else adapter_rules(model)
        _load(model, grad_sync, mesh, {name: tensor for name, tensor in tensors.items() if name not in rules}, folder)
        if config.lora is not None:
            adapters = {name: grad_sync.as_global(name, grad_sync.masters[name]) for name in rules}
            init_weights(adapters, std=0.0, seed=config.lora.seed, rules=rules)
            log.info("adapters: drawn from model.lora.seed %d, %d layers", config.lora.seed, len(rules) // 2)
    grad_sync.publish()


def load_frozen_weights(model: CausalLM, grad_sync: GradSync, mesh: Mesh, *, folder: Path | None) -> None:
    """Load what stands frozen beside adapters, which no checkpoint holds. Collective.

    Args:
        folder: of `model.name`.

    Raises:
        RunError: on every rank, when the weights cannot be loaded on any.
    """
    _load(model, grad_sync, mesh, grad_sync.frozen, folder)


def _load(model: CausalLM, grad_sync: GradSync, mesh: Mesh, tensors: dict[str, Tensor], folder: Path | None) -> None:
    """Fill this rank's `tensors`, by canonical name, from the weights in `folder`."""
    assert folder is not None, "SFTConfig.run_faults asks for one of model.name, [model.init], [resume]"
    parameters = {name: grad_sync.as_global(name, tensor) for name, tensor in tensors.items()}
    tied = {copy: name for copy, name in model.tied_names.items() if name in parameters}
    vocabulary = [name for name in model.vocabulary_names if name in parameters]
    is_shown = mesh.rank == 0
    num_bytes = agree(
        mesh,
        lambda: load_weights(
            folder, parameters, tied=tied, show_progress=is_shown, vocabulary=vocabulary, open_files=open_model
        ),
    )[0]
    log.info("weights: from %s, %d tensors, %.3g GB", folder, len(parameters), num_bytes / 1e9)


def choose_attention(attn: str, device: torch.device, compute_dtype: torch.dtype) -> str:
    """`auto` is varlen where its kernel runs (CUDA, bfloat16), else sdpa.

    Raises:
        ConfigError: varlen was asked for where it cannot run.
    """
    has_varlen = device.type == "cuda" and compute_dtype == torch.bfloat16
    if attn == "varlen" and not has_varlen:
        raise ConfigError.one("model.attn", f"varlen runs on CUDA in bfloat16, not on {device.type} in {compute_dtype}")
    if attn == "auto":
        return "varlen" if has_varlen else "sdpa"
    return attn
