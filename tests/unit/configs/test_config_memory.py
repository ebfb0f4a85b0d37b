"""Which precisions and memory levers go together; what does not is refused, with its reason."""

import pytest
from pydantic import ValidationError

from configs.model import ModelConfig
from configs.sft import SFTConfig

ARCH = {"model_type": "llama"}


def table(**model) -> ModelConfig:
    return ModelConfig.model_validate({"arch": ARCH, "init": {}} | model)


def run_faults(*, data: dict | None = None, optim: dict | None = None, ranks: int = 1, **model) -> dict[str, str]:
    config = SFTConfig.model_validate(
        {
            "model": {"arch": ARCH, "init": {}} | model,
            "data": {"type": "fake", "seq_len": 8, "batch_size": 8, "micro_batch_size": 2} | (data or {}),
            "optim": optim or {},
            "max_steps": 1,
            "deployment": {"type": "single_node", "num_train_gpus": ranks},
        }
    )
    return {fault.key: fault.message for fault in config.run_faults()}


@pytest.mark.parametrize(
    ("model", "key", "reason"),
    [
        ({"ac": {"mode": "selective"}, "ac_offloading": {}}, "ac_offloading", "keeps its results on the GPU"),
        ({"optim_cpu_offload": True, "fsdp_cpu_offload": True}, "optim_cpu_offload", "part of what fsdp_cpu_offload"),
        ({"reduce_dtype": "bfloat16", "defer_grad_sync": True}, "reduce_dtype", "add up micro-batches in bfloat16"),
        ({"reduce_dtype": "bfloat16", "defer_replicate_sync": True}, "reduce_dtype", "with defer_replicate_sync would"),
        (
            {"optimization_dtype": "bfloat16", "compute_dtype": "float32"},
            "compute_dtype",
            "masters in bfloat16 hold no more digits",
        ),
        ({"optimization_dtype": "float64", "reduce_dtype": "float32"}, "reduce_dtype", "would lose"),
    ],
)
def test_what_does_not_go_together(model, key, reason):
    with pytest.raises(ValidationError) as caught:
        table(**model)
    assert f"{key}: " in str(caught.value)
    assert reason in str(caught.value)


def test_what_goes_together():
    table(ac_offloading={}, ac={"mode": "full"}, compile={})
    table(ac_offloading={}, compile={}, optim_cpu_offload=True, optimization_dtype="bfloat16")
    table(reduce_dtype="bfloat16")


def test_sums_over_ranks_are_wide_unless_asked():
    for masters, expected in (("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")):
        assert ModelConfig.model_validate({"optimization_dtype": masters}).resolved_reduce_dtype == expected


def test_gradients_are_not_added_up_in_bfloat16():
    """One rank sums in fp32, and so does a deferred reduction; FSDP's own sums would have the masters' dtype."""
    bf16 = {"optimization_dtype": "bfloat16"}
    assert run_faults(**bf16) == {}
    assert list(run_faults(ranks=2, **bf16)) == ["model.optimization_dtype"]
    assert run_faults(ranks=4, **bf16) == {}  # one micro-batch per step
    assert list(run_faults(ranks=4, cp=2, **bf16)) == ["model.optimization_dtype"]  # two
    assert run_faults(ranks=2, defer_grad_sync=True, **bf16) == {}


def test_moments_in_bfloat16_fade():
    faults = run_faults(optimization_dtype="bfloat16", optim={"betas": [0.9, 0.999]})
    assert list(faults) == ["optim.betas"]
    assert faults["optim.betas"].startswith("0.999 is above 0.996")
    assert run_faults(optimization_dtype="bfloat16", optim={"betas": [0.9, 0.99]}) == {}
    assert run_faults(optim={"betas": [0.9, 0.999]}) == {}


def test_fsdp_on_the_host_needs_fsdp():
    assert list(run_faults(fsdp_cpu_offload=True)) == ["model.fsdp_cpu_offload"]
    assert run_faults(fsdp_cpu_offload=True, ranks=2) == {}


def test_no_other_dtype():
    with pytest.raises(ValidationError):
        ModelConfig.model_validate({"optimization_dtype": "float16"})
