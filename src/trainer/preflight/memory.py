"""What is said of memory before a run: the estimate of a rank's peak, and levers that have no GPU to relieve."""

from collections.abc import Iterator

import torch

from configs.errors import Fault
from configs.sft import SFTConfig
from models.errors import one_line
from trainer.memory import RankShape, estimate_memory
from trainer.preflight.checks import check_model
from trainer.preflight.inputs import ModelInputs
from trainer.preflight.plan import Plan


def lever_faults(config: SFTConfig) -> Iterator[Fault]:
    """Levers that move memory from a GPU to the host, on a machine without one. With [slurm] the run is elsewhere. What
    is only scored has neither activations to keep nor moments."""
    if torch.cuda.is_available() or config.slurm is not None:
        return
    model = config.model
    levers = {
        "ac_offloading": model.ac_offloading is not None and not config.only_scores,
        "optim_cpu_offload": model.optim_cpu_offload and not config.only_scores,
        "fsdp_cpu_offload": model.fsdp_cpu_offload,
    }
    for key, is_on in levers.items():
        if is_on:
            message = "moves memory from a GPU to the host, and there is no GPU here; leave it out"
            yield Fault(key=f"model.{key}", message=message)


def memory_lines(config: SFTConfig, inputs: ModelInputs, plan: Plan, *, capacity: int | None = None) -> list[str]:
    """The estimate of a training's peak memory on each GPU, for people.

    Args:
        capacity: bytes of the GPU, where it is known.
    """
    shape = RankShape(
        rows=config.data.micro_batch_size,
        seq_len=config.data.seq_len,
        grad_accum_steps=plan.grad_accum_steps,
        world_size=plan.world_size,
        dp_replicate=config.dp_replicate,
    )
    try:
        estimate = estimate_memory(config.model, check_model(config, inputs), shape)
    except Exception as error:  # it leans on insides of torch, and no run should fail for want of an estimate
        return [f"memory: not estimated: {one_line(error)}"]
    lines = estimate.lines()
    if capacity is not None:
        lines.append(f"memory: the GPU has {capacity / 2**30:.1f} GiB")
        if estimate.total > capacity:
            lines.append("memory: likely not enough; docs/memory.md has what lowers it")
    return lines
