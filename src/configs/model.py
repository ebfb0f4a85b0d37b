"""`[model]`: which network, where its first weights come from, and how it computes."""

import re
from typing import Any, Literal

from pydantic import Field

from configs.base import BaseConfig
from configs.errors import Fault

Dtype = Literal["bfloat16", "float32", "float64"]

_DIGITS: dict[Dtype, int] = {"bfloat16": 8, "float32": 24, "float64": 53}

_HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Whether `name`, where no folder has it, can be an id on the Hugging Face hub: `model` or `owner/model`."""
    return _HUB_ID.fullmatch(name) is not None


class InitConfig(BaseConfig):
    """`[model.init]`: train from scratch. Values depend on the seed and the parameter's name alone."""

    std: float = Field(default=0.02, gt=0)
    """Standard deviation of every weight matrix and embedding."""

    seed: int = Field(default=0, ge=0)
    """Seed of the initial weights."""


class CompileConfig(BaseConfig):
    """`[model.compile]`: `torch.compile` of each transformer block."""

    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """Mode given to torch.compile."""

    fullgraph: bool = False
    """Fail where a block would break into several graphs."""


class ActivationCheckpointConfig(BaseConfig):
    """`[model.ac]`: recompute activations in the backward pass to save memory."""

    mode: Literal["full", "selective"] = "full"
    """`full` keeps only each block's input; `selective` also keeps the results of matrix products and attention."""

    freq: int = Field(default=1, ge=1)
    """Recompute every freq-th block."""


class ActivationOffloadConfig(BaseConfig):
    """`[model.ac_offloading]`: keep activations for the backward pass in host memory. See docs/memory.md."""

    max_inflight_activations: int = Field(default=2, ge=1)
    """Blocks whose activations may be on the GPU besides the running one's: on their way out, or back."""


class DebugModelConfig(BaseConfig):
    """`[model.debug]`: short cuts for a quick look, never for a result."""

    num_layers: int | None = Field(default=None, ge=1)
    """Keep only the first blocks of the model, and load only theirs."""

    random_init: bool = False
    """Speed tests only: weights are neither downloaded nor loaded nor drawn, all parameters are one constant."""


class LoRAConfig(BaseConfig):
    """`[model.lora]`: train low-rank adapters (Hu et al. 2021, arXiv:2106.09685) beside frozen weights, with peft."""

    rank: int = Field(default=16, ge=1)
    """Rank of the adapters."""

    alpha: float = Field(default=32.0, gt=0)
    """The adapters' output is scaled by alpha / rank."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs set to 0 in training."""

    target_modules: list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], min_length=1
    )
    """Linear layers that get an adapter, by the end of their names."""

    modules_to_save: list[str] = Field(default=[])
    """Modules that are trained whole beside the adapters, by the end of their names."""

    seed: int = Field(default=0, ge=0)
    """Seed of the adapters' first values and of their dropout."""


class ModelConfig(BaseConfig):
    """`[model]`"""

    name: str | None = Field(default=None, min_length=1)
    """A folder in Hugging Face's layout, or an id on its hub: `config.json` gives the network, its safetensors the
    first weights. With `[model.init]` only the network is taken. Code in it never runs."""

    arch: dict[str, Any] | None = None
    """In place of `name`: `model_type` and the fields of its Hugging Face config class. `vocab_size` defaults to the
    tokenizer's length rounded up to a multiple of 128; the special token ids come from the tokenizer."""

    init: InitConfig | None = None
    """Present: the weights are drawn anew (skipped when resuming)."""

    debug: DebugModelConfig = DebugModelConfig()
    """Short cuts for a quick look."""

    impl: Literal["auto", "custom", "hf"] = "auto"
    """`custom`: the implementation here. `hf`: that of transformers, with attention inside documents all the same.
    `auto`: custom where the family is implemented here, else hf; the log says which."""

    vocab_multiple: int = Field(default=128, ge=1)
    """The embedding of `name` grows to a multiple of this where the tokenizer has more tokens than it has rows."""

    lora: LoRAConfig | None = None
    """Train adapters only."""

    attn: Literal["auto", "sdpa", "varlen"] = "auto"
    """`varlen`: torch.nn.attention.varlen, CUDA and bfloat16 only. `sdpa`: scaled_dot_product_attention, one call per
    document. `auto`: varlen where it can run, else sdpa; the log says which."""

    compile: CompileConfig | None = None
    """Compile each block."""

    ac: ActivationCheckpointConfig | None = None
    """Activation checkpointing."""

    ac_offloading: ActivationOffloadConfig | None = None
    """Activations in host memory."""

    compute_dtype: Dtype | None = None
    """Dtype of the forward and backward pass. Unset: bfloat16, or float64 with `optimization_dtype = "float64"`."""

    optimization_dtype: Dtype = "float32"
    """Dtype of the master weights and of the optimizer's state. bfloat16 halves their memory, and rounds away updates
    below 1/256 of a weight: see docs/memory.md."""

    reduce_dtype: Dtype | None = None
    """Dtype of gradient sums over ranks. Unset: that of the master weights, at least float32."""

    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward pass (FSDP, above one rank)."""

    defer_grad_sync: bool = False
    """Above one rank: reduce gradients once per optimizer step instead of after every micro-batch. Costs the memory
    of unsharded gradients and weights."""

    defer_replicate_sync: bool = False
    """With dp_replicate above 1: after every micro-batch only reduce within a replica; add up over the replicas once
    per optimizer step. Costs the memory of sharded gradients."""

    dp_replicate: int = Field(default=1, ge=1)
    """Replicas of the sharded weights (HSDP): gathered within a replica, gradients added up over replicas."""

    cp: int = Field(default=1, ge=1)
    """Ranks that share each row (context parallelism). The others shard the weights: dp_shard = ranks /
    (dp_replicate x cp), and weights lie over dp_shard x cp."""

    cp_style: Literal["ulysses", "ring"] = "ulysses"
    """`ulysses`: each rank attends over the whole row for a part of the heads. `ring`: keys and values go round."""

    ep: int = Field(default=1, ge=1)
    """Expert parallelism: 1, since no mixture-of-experts family is implemented here."""

    fsdp_cpu_offload: bool = False
    """Above one rank: weights, gradients and optimizer state in host memory, gathered to the GPU block by block."""

    optim_cpu_offload: bool = False
    """Optimizer moments in pinned host memory; the update brings them to the GPU piece by piece."""

    @property
    def takes_weights_of_name(self) -> bool:
        """The first weights, unless the run resumes, are those of `name`."""
        return self.name is not None and self.init is None and not self.debug.random_init

    @property
    def resolved_compute_dtype(self) -> Dtype:
        """Dtype of the forward and backward pass."""
        return self.compute_dtype or ("float64" if self.optimization_dtype == "float64" else "bfloat16")

    @property
    def resolved_reduce_dtype(self) -> Dtype:
        """Dtype of gradient sums over ranks."""
        return self.reduce_dtype or ("float64" if self.optimization_dtype == "float64" else "float32")

    def table_faults(self) -> list[Fault]:
        faults = []
        if self.arch is not None and not isinstance(self.arch.get("model_type"), str):
            message = 'is missing: text, the family of the model, for example model_type = "llama"'
            faults.append(Fault(key="arch.model_type", message=message))
        if self.debug.random_init and self.init is not None:
            message = "leaves the weights undrawn, and [model.init] draws them; give only one of them"
            faults.append(Fault(key="debug.random_init", message=message))
        if self.lora is not None and self.init is not None:
            message = "goes beside weights that are there, and [model.init] draws them anew; give only one of them"
            faults.append(Fault(key="lora", message=message))
        elif self.lora is not None and self.name is None and not self.debug.random_init:
            message = (
                "goes beside weights that are there: give model.name, a Hugging Face model (export-hf makes one of a "
                "checkpoint), in place of [model.arch]"
            )
            faults.append(Fault(key="lora", message=message))
        if self.lora is not None and self.debug.num_layers is not None and not self.debug.random_init:
            message = "leaves adapters that fit no whole model; leave it or [model.lora] out"
            faults.append(Fault(key="debug.num_layers", message=message))
        faults += self._dtype_faults()
        if self.ep > 1:
            message = f"{self.ep} needs a mixture-of-experts model, and no family of them is implemented here"
            faults.append(Fault(key="ep", message=message))
        if self.defer_grad_sync and self.defer_replicate_sync:
            message = "is part of what defer_grad_sync does; give only one of them"
            faults.append(Fault(key="defer_replicate_sync", message=message))
        if self.cp > 1 and self.impl == "hf":
            message = f"{self.cp} needs the implementation here: the models of transformers see whole rows"
            faults.append(Fault(key="cp", message=message))
        faults += self._memory_faults()
        if self.attn == "varlen" and self.resolved_compute_dtype != "bfloat16":
            message = f'"varlen" computes in bfloat16 only, not in {self.resolved_compute_dtype}; use "sdpa" or "auto"'
            faults.append(Fault(key="attn", message=message))
        return faults

    def _dtype_faults(self) -> list[Fault]:
        faults = []
        masters = self.optimization_dtype
        for key in ("compute_dtype", "reduce_dtype"):
            dtype = getattr(self, key)
            if masters == "float64" and dtype not in (None, "float64"):
                message = f'"{dtype}" would lose what optimization_dtype = "float64" keeps; leave it unset'
                faults.append(Fault(key=key, message=message))
        if self.compute_dtype is not None and _DIGITS[self.compute_dtype] > _DIGITS[masters]:
            compute = self.compute_dtype
            message = f'"{compute}" needs optimization_dtype = "{compute}": masters in {masters} hold no more digits'
            faults.append(Fault(key="compute_dtype", message=message))
        if self.reduce_dtype == "bfloat16" and (self.defer_grad_sync or self.defer_replicate_sync):
            deferred = "defer_grad_sync" if self.defer_grad_sync else "defer_replicate_sync"
            message = f'"bfloat16" with {deferred} would add up micro-batches in bfloat16; give only one of them'
            faults.append(Fault(key="reduce_dtype", message=message))
        return faults

    def _memory_faults(self) -> list[Fault]:
        faults = []
        if self.ac_offloading is not None and self.ac is not None and self.ac.mode == "selective":
            message = (
                'does not go with model.ac.mode = "selective", which keeps its results on the GPU; use "full", or '
                "leave [model.ac] out"
            )
            faults.append(Fault(key="ac_offloading", message=message))
        if self.optim_cpu_offload and self.fsdp_cpu_offload:
            message = "is part of what fsdp_cpu_offload does; give only one of them"
            faults.append(Fault(key="optim_cpu_offload", message=message))
        return faults
