"""`[model]`: which network, where its first weights come from, and how it computes."""

from typing import Any, Literal

from pydantic import Field, model_validator

from configs.base import BaseConfig

Dtype = Literal["bfloat16", "float32", "float64"]


class InitConfig(BaseConfig):
    """`[model.init]`: train from scratch. Values depend on the seed and the parameter's name alone."""

    std: float = Field(0.02, gt=0)
    """Standard deviation of every weight matrix and embedding."""

    seed: int = Field(0, ge=0)
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

    freq: int = Field(1, ge=1)
    """Recompute every freq-th block."""


class ModelConfig(BaseConfig):
    """`[model]`"""

    name: str | None = None
    """Name shown in the run's name and logs."""

    arch: dict[str, Any] | None = None
    """`model_type` and the fields of its Hugging Face config class. `vocab_size` defaults to the tokenizer's length
    rounded up to a multiple of 128; the special token ids come from the tokenizer."""

    init: InitConfig | None = None
    """Present: the weights are drawn anew (skipped when resuming)."""

    attn: Literal["auto", "sdpa", "varlen"] = "auto"
    """`varlen`: torch.nn.attention.varlen, CUDA and bfloat16 only. `sdpa`: scaled_dot_product_attention, one call per
    document. `auto`: varlen where it can run, else sdpa; the log says which."""

    compile: CompileConfig | None = None
    """Compile each block."""

    ac: ActivationCheckpointConfig | None = None
    """Activation checkpointing."""

    compute_dtype: Dtype | None = None
    """Dtype of the forward and backward pass. Unset: bfloat16, or float64 with `optimization_dtype = "float64"`."""

    optimization_dtype: Literal["float32", "float64"] = "float32"
    """Dtype of the master weights and of the optimizer's state."""

    reduce_dtype: Dtype | None = None
    """Dtype of gradient sums over micro-batches and ranks. Unset: that of the master weights."""

    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward pass (FSDP, above one rank)."""

    defer_grad_sync: bool = False
    """Above one rank: reduce gradients once per optimizer step instead of after every micro-batch. Costs the memory
    of unsharded gradients and weights."""

    @model_validator(mode="after")
    def _arch_has_a_type(self) -> "ModelConfig":
        if self.arch is not None and not isinstance(self.arch.get("model_type"), str):
            raise ValueError('arch needs `model_type`, for example model_type = "llama"')
        return self
