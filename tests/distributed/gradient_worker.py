"""One rank of test_gradient_equivalence: loss and gradients of one global batch under several settings.

Usage: gradient_worker.py OUT SETTINGS_JSON, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.
"""

import json
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from configs.data import FakeDataConfig
from configs.model import ModelConfig
from models.init import init_weights
from models.registry import build_config
from trainer.data.build import build_source
from trainer.data.loader import RowLoader
from trainer.micro_batch import run_micro_batches
from trainer.model_setup import build_parallel_model
from trainer.parallel.mesh import Mesh, build_mesh

BATCH_SIZE, SEQ_LEN = 8, 24
ARCH = {
    "model_type": "qwen3",
    "vocab_size": 67,
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
}


def measure(mesh: Mesh, setting: dict) -> dict[str, torch.Tensor]:
    """Float64 gradients of one global batch by parameter name, and "loss" (mean over loss tokens)."""
    arch = ARCH | {"tie_word_embeddings": setting["tied"]}
    model_config = build_config(arch, tokenizer_length=None, special_ids={})
    config = ModelConfig.model_validate(
        {"arch": arch, "init": {}, "optimization_dtype": "float64", "defer_grad_sync": setting["defer"]}
        | ({"ac": {"mode": setting["ac"]}} if setting["ac"] else {})
    )
    model, grad_sync = build_parallel_model(config, model_config, seq_len=SEQ_LEN, mesh=mesh)
    masters = {name: grad_sync.as_global(name, master) for name, master in grad_sync.masters.items()}
    init_weights(masters, std=0.2, seed=3, rules=model.init_rules())
    grad_sync.publish()
    data = FakeDataConfig(
        type="fake", seq_len=SEQ_LEN, batch_size=BATCH_SIZE, length="variable", input_ids="random", num_rows=100
    )
    loader = RowLoader(
        build_source(data, vocab_size=model_config.vocab_size, eos_token_id=None, tokenizer_name=None),
        batch_size=BATCH_SIZE,
        micro_batch_size=setting["micro_batch_size"],
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        num_workers=0,
        pin_memory=False,
    )
    batches = loader.step(5)
    result = run_micro_batches(model, batches.micro_batches, batches.num_loss_tokens, grad_sync, mesh)
    out = {}
    for name, gradient in grad_sync.gradients().items():
        whole = grad_sync.as_global(name, gradient)
        out[name] = whole.full_tensor() if isinstance(whole, DTensor) else whole
    out["loss"] = mesh.sum_(result.nats) / result.loss_tokens
    return out


def main() -> None:
    torch.set_num_threads(1)
    mesh = build_mesh(60)
    if mesh.world_size == 1:
        dist.init_process_group("gloo")
    settings = json.loads(sys.argv[2])
    results = []
    for setting in settings:
        here = mesh
        if setting.get("sharded_at_one_rank"):
            here = replace(mesh, device_mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",)))
        results.append(measure(here, setting))
    if mesh.rank == 0:
        torch.save(results, sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
