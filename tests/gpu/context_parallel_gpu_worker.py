"""One rank of test_context_parallel_gpu: gradients of packed rows that two GPUs share, beside those of one GPU.

Usage: context_parallel_gpu_worker.py OUT, with RANK, LOCAL_RANK, WORLD_SIZE = 2, MASTER_ADDR and MASTER_PORT in the
environment. OUT gets gradients by parameter name and the "loss", by case.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.data import FakeDataConfig
from configs.model import ModelConfig
from models.registry import build_config
from trainer.data.build import build_source
from trainer.data.loader import RowLoader
from trainer.micro_batch import run_micro_batches
from trainer.model_setup import build_parallel_model, set_first_weights
from trainer.parallel.mesh import Mesh, build_mesh, one_rank_mesh

SEQ_LEN, BATCH_SIZE = 2048, 4
ARCH = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
SHARED: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"compile": {}},
    "selective": {"compile": {}, "ac": {"mode": "selective"}},
    "full": {"ac": {"mode": "full"}},
}


def gradients(mesh: Mesh, **table: Any) -> dict[str, Tensor]:
    """Of one global batch, on the second of two tries: of a compiled model another batch comes first."""
    config = ModelConfig.model_validate({"arch": ARCH, "init": {"std": 0.05}, "cp": mesh.cp_size} | table)
    arch = build_config(ARCH, tokenizer_length=None, special_ids={})
    model, grad_sync = build_parallel_model(config, arch, seq_len=SEQ_LEN, mesh=mesh)
    set_first_weights(config, model, grad_sync, mesh, folder=None)
    sizes: dict[str, Any] = {"seq_len": SEQ_LEN, "batch_size": BATCH_SIZE, "micro_batch_size": 2}
    data = FakeDataConfig(type="fake", length="variable", input_ids="random", **sizes)
    source = build_source(data, vocab_size=4096, eos_token_id=None, tokenizer_name=None)
    loader = RowLoader(
        source,
        batch_size=BATCH_SIZE,
        micro_batch_size=2,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        num_workers=0,
        pin_memory=mesh.device.type == "cuda",
    )
    for step in range(2):
        grad_sync.clear_gradients()
        batches = loader.step(step)
        result = run_micro_batches(model, batches.micro_batches, batches.num_loss_tokens, grad_sync, mesh)
    nats = result.nats if mesh.world_size == 1 else mesh.sum_(result.nats)
    parts = {name: grad_sync.as_global(name, part) for name, part in grad_sync.gradients().items()}
    whole = {name: part.full_tensor() if isinstance(part, DTensor) else part for name, part in parts.items()}
    torch._dynamo.reset()
    return {name: part.cpu() for name, part in whole.items()} | {"loss": (nats / result.loss_tokens).cpu()}


def main() -> None:
    mesh = build_mesh(120, cp=2)
    results = {
        f"{style}, {name}": gradients(mesh, cp_style=style, **table)
        for style in ("ulysses", "ring")
        for name, table in SHARED.items()
    }
    exact = {"optimization_dtype": "float64"}
    results |= {f"{style}, float64": gradients(mesh, cp_style=style, **exact) for style in ("ulysses", "ring")}
    if mesh.rank == 0:
        alone = one_rank_mesh(mesh.device)
        results |= {"one": gradients(alone), "one, float64": gradients(alone, **exact)}
        torch.save(results, sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
