"""From a config to a model of transformers behind our interface."""

import torch
from transformers import PretrainedConfig

from models.hf.modeling import TransformersForCausalLM
from models.hf.proof import prove
from models.hf.refusals import refuse_config


def build_transformers_model(
    config: PretrainedConfig, *, seq_len: int, attn: str, dtype: torch.dtype
) -> TransformersForCausalLM:
    """The model, on the current default device, once a small twin of it has passed models.hf.proof.

    Args:
        config: of a causal language model of transformers.
        seq_len: longest row it will see.
        attn: "sdpa" or "varlen".
        dtype: of the parameters.

    Raises:
        ArchError: it cannot be computed exactly inside documents, or that cannot be checked.
    """
    refuse_config(config, seq_len=seq_len)
    first_values = prove(config, seq_len=seq_len)
    return TransformersForCausalLM(config, seq_len=seq_len, attn=attn, dtype=dtype, first_values=first_values)
