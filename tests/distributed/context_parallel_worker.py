"""The ranks of test_context_parallel: what those that share rows compute, beside what one rank computes of the same.

Usage: context_parallel_worker.py OUT SHARDS PORT. OUT gets a list of (case, found, expected), both dicts of tensors, as
rank 0 sees them.
"""

import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.model import ModelConfig
from models.base import CausalLM
from models.batch import IGNORE_INDEX, Batch
from models.init import init_weights
from models.layers.context_parallel import ring
from models.layers.context_parallel.base import ContextParallel
from models.layers.context_parallel.parts import Kernel, choose_kernel
from models.layers.context_parallel.ring import Ring
from models.layers.context_parallel.ulysses import Ulysses
from models.registry import build_config, build_model
from trainer.data.collate import collate
from trainer.data.loader import RowLoader
from trainer.data.row import Rows, RowSource
from trainer.micro_batch import run_micro_batches
from trainer.model_setup import build_parallel_model
from trainer.parallel.mesh import Mesh, build_mesh, one_rank_mesh
from trainer.validation import Validation
from trainer.validation.chat_task import ChatTask
from trainer.validation.set_task import SetTask
from trainer.validation.sets.token_folder import TokenFolder

RANKS, VOCAB, SEQ_LEN = 4, 67, 24
ARCH: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
SMOLLM3 = {"model_type": "smollm3", "no_rope_layers": [0, 1], "rope_parameters": YARN, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one key-value head": {"num_key_value_heads": 1},
    "a key-value head each": {"model_type": "llama", "num_key_value_heads": 8},
    "layers without RoPE": SMOLLM3 | {"num_key_value_heads": 4},
}
Tensors = dict[str, Tensor]
Case = tuple[str, Tensors, Tensors]


def make_model(arch: dict[str, Any]) -> CausalLM:
    with torch.device("meta"):
        config = build_config(ARCH | arch, tokenizer_length=None, special_ids={})
        model = build_model(config, seq_len=SEQ_LEN, attn="sdpa", dtype=torch.float64)
    model.to_empty(device="cpu")
    init_weights(dict(model.named_parameters()), std=0.3, seed=1, rules=model.init_rules())
    return model


def make_batch(lengths: list[list[int]], *, full_rows: bool = False) -> Batch:
    """Documents of these lengths, the last 4 positions of the last row padding."""
    generator = np.random.default_rng(0)
    rows = Rows.empty(len(lengths), SEQ_LEN)
    tokens = generator.integers(0, VOCAB, (len(lengths), SEQ_LEN + 1))
    rows.input_ids[:], rows.labels[:] = tokens[:, :-1], tokens[:, 1:]
    rows.labels[:, ::5] = rows.labels[-1, -4:] = IGNORE_INDEX
    rows.num_padding[-1] = 4
    rows.segment_lengths = [np.array(of_row) for of_row in lengths]
    return collate(rows, full_rows=full_rows, pin_memory=False)


BATCHES = {
    "packed": make_batch([[5, 11, 8], [1, 19, 4], [20, 4]]),
    "other documents": make_batch([[2, 3, 19], [4, 4, 12, 4], [9, 8, 3, 4]]),
    "whole rows": make_batch([[24], [24]], full_rows=True),
}


def measure(model: CausalLM, batch: Batch) -> Tensors:
    """Loss, nats and hits of each position, and gradients by parameter name."""
    model.zero_grad()
    output = model(batch, torch.tensor(0.01, dtype=torch.float64), greedy=True)
    output.loss.backward()
    assert output.greedy_hits is not None
    gradients = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return gradients | {"loss": output.loss.detach(), "nats": output.nats, "hits": output.greedy_hits.double()}


@torch.no_grad()
def logits_of(model: CausalLM, batch: Batch) -> Tensors:
    return {"logits": model.logits(batch)}


def added_up(parts: Tensors, group: dist.ProcessGroup) -> Tensors:
    for part in parts.values():
        dist.all_reduce(part, group=group)
    return parts


def on_rank_0(compute: Callable[..., Tensors], *arguments: Any) -> Tensors:
    """What is expected; nobody reads it on other ranks."""
    return compute(*arguments) if dist.get_rank() == 0 else {}


def models_alone(parallel: ContextParallel) -> Iterator[Case]:
    """The model's side by itself, without what shards weights."""
    for name, arch in MODELS.items():
        plain, shared = make_model(arch), make_model(arch)
        shared.share_rows(parallel)
        for form, batch in BATCHES.items():
            yield f"{name}, {form}", added_up(measure(shared, batch), parallel.group), on_rank_0(measure, plain, batch)
    logits = added_up(logits_of(shared, batch), parallel.group)
    yield "logits", logits, on_rank_0(logits_of, plain, batch)
    batch = BATCHES["packed"]
    expected = on_rank_0(measure, plain, batch)
    for mode in ("full", "selective"):
        shared.apply_activation_checkpointing(mode, 1)
        yield mode, added_up(measure(shared, batch), parallel.group), expected


def kernels_of_ring(parallel: Ring) -> None:
    """Kernels that know no documents are for rows that are one document each."""
    model, asked = make_model({}), []
    model.share_rows(parallel)

    def watch(*heads: Tensor, whole_rows: bool) -> Kernel:
        asked.append(whole_rows)
        return choose_kernel(*heads, whole_rows=whole_rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "choose_kernel", watch)
        for name in ("packed", "whole rows"):
            logits_of(model, BATCHES[name])
    assert asked == [False, False, True, True]  # of two layers each


def compiled(parallel: ContextParallel) -> Iterator[Case]:
    """Blocks as whole graphs, recomputed: captured and differentiated as on a GPU, but run without inductor."""
    compile_with = torch.compile
    torch.compile = lambda run, mode, **options: compile_with(run, backend="aot_eager", **options)
    plain, shared = make_model({}), make_model({})
    shared.share_rows(parallel)
    shared.apply_activation_checkpointing("selective", 1)
    shared.compile_blocks("default", fullgraph=True)
    # Without a recompilation for other documents, which only ring attention takes in a whole graph here.
    names = ("packed", "other documents") if isinstance(parallel, Ring) else ("whole rows",)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for name in names:
            found = added_up(measure(shared, BATCHES[name]), parallel.group)
            yield f"compiled, {name}", found, on_rank_0(measure, plain, BATCHES[name])
    torch._dynamo.reset()
    torch.compile = compile_with


def decayed_sums(values: Tensor, decays: Tensor, starts: Tensor) -> Tensor:
    """A recurrence with independent heads that forgets at the start of a document: (rows, seq_len, heads, width),
    (heads,), (rows, seq_len) bool -> like values."""
    state, states = torch.zeros_like(values[:, 0]), []
    for position in range(values.size(1)):
        kept = torch.where(starts[:, position, None], 0.0, decays)  # (rows, heads)
        state = kept[..., None] * state + values[:, position]
        states.append(state)
    return torch.stack(states, dim=1)


def recurrence(parallel: ContextParallel) -> Iterator[Case]:
    """A recurrent layer through `to_heads` and `to_rows`, over packed documents."""
    generator = torch.Generator().manual_seed(0)
    batch = BATCHES["packed"]
    starts = batch.position_ids == 0
    whole = torch.randn((3, SEQ_LEN, 8, 5), dtype=torch.float64, generator=generator)
    weights = torch.randn(whole.shape, dtype=torch.float64, generator=generator)
    decays = torch.linspace(0.5, 0.99, 8, dtype=torch.float64)
    values = whole.clone().requires_grad_()
    states = decayed_sums(values, decays, starts)
    (states * weights).sum().backward()
    assert values.grad is not None
    expected = {"states": states.detach(), "gradient": values.grad}

    mine = parallel.share(whole).clone().requires_grad_()
    own_decays = decays.chunk(parallel.size)[parallel.rank]
    own = parallel.to_rows(decayed_sums(parallel.to_heads(mine), own_decays, starts))
    (own * parallel.share(weights)).sum().backward()
    assert mine.grad is not None and mine.shape == own.shape == (3, SEQ_LEN // parallel.size, 8, 5)
    found = {"states": parallel.place(own), "gradient": parallel.place(mine.grad)}
    yield "recurrence", added_up(found, parallel.group), expected
    assert torch.equal(parallel.to_rows(parallel.to_heads(mine)), mine)
    with pytest.raises(ValueError, match=f"rows of {SEQ_LEN + 1} positions cannot be cut into"):
        parallel.share(torch.empty(1, SEQ_LEN + 1))
    assert torch.equal(parallel.place(mine).count_nonzero(), torch.tensor(mine.numel()))


def make_chats() -> RowSource:
    """Conversations, several to a row; about half of the tokens carry loss, and most rows have padding."""
    path = Path(__file__).parents[1] / "unit" / "chat" / "conftest.py"
    spec = importlib.util.spec_from_file_location("chat_conftest", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    samples = module._random_samples(0, 15, shortest=3, longest=30, vocab_size=VOCAB)
    return module._make_chat_source([samples], SEQ_LEN, overflow="split", padding_id=5)


def whole_run(mesh: Mesh, style: str, source: RowSource, shards: Path) -> tuple[Tensors, Tensors]:
    """A step's loss and gradients on chats through the parts of the trainer, and a round of validation."""
    config = ModelConfig.model_validate(
        {"arch": ARCH, "init": {}, "optimization_dtype": "float64", "cp": mesh.cp_size, "cp_style": style}
    )
    arch = build_config(ARCH, tokenizer_length=None, special_ids={})
    model, grad_sync = build_parallel_model(config, arch, seq_len=SEQ_LEN, mesh=mesh)
    masters = {name: grad_sync.as_global(name, master) for name, master in grad_sync.masters.items()}
    init_weights(masters, std=0.3, seed=2, rules=model.init_rules())
    grad_sync.publish()
    loader = RowLoader(
        source,
        batch_size=8,
        micro_batch_size=2,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        num_workers=0,
        pin_memory=False,
    )
    batches = loader.step(0)
    result = run_micro_batches(model, batches.micro_batches, batches.num_loss_tokens, grad_sync, mesh)
    step = {name: grad_sync.as_global(name, part) for name, part in grad_sync.gradients().items()}
    step = {name: part.full_tensor() if isinstance(part, DTensor) else part.clone() for name, part in step.items()}
    step |= {"loss": mesh.sum_(result.nats) / result.loss_tokens, "loss tokens": result.loss_tokens}

    counts = np.ones(VOCAB, np.int64)
    folder = TokenFolder("shards", shards, byte_counts=counts, eos_token_id=None, tokenizer_name="tiny", prefix_id=3)
    tasks = [
        ChatTask(source, rows_per_forward=3),
        SetTask(folder, seq_len=SEQ_LEN, micro_batch_tokens=2 * SEQ_LEN, text_ids=torch.arange(VOCAB) != 3),
        SetTask(folder, seq_len=8, micro_batch_tokens=16, text_ids=torch.arange(VOCAB) != 3),
    ]
    metrics = Validation(tasks=tasks, mesh=mesh, pin_memory=False).run(model)
    assert metrics is not None
    return step, {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}


def run_rank(rank: int, out: str, shards: Path, port: str) -> None:
    """One of the processes."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{RANKS}"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    torch.set_num_threads(1)
    mesh = build_mesh(60, cp=2)
    four = replace(mesh, cp_size=4, cp_rank=mesh.rank, cp_group=dist.group.WORLD, dp_rank=0, dp_size=1)
    chats = make_chats()
    step, metrics = whole_run(one_rank_mesh(torch.device("cpu")), "ulysses", chats, shards)
    cases: list[Case] = []
    for here in (mesh, four):
        assert here.cp_group is not None
        for style, parallel in {"ulysses": Ulysses(here.cp_group), "ring": Ring(here.cp_group)}.items():
            found = [*models_alone(parallel), *recurrence(parallel)]
            if here is mesh and mesh.dp_rank == 0:
                if isinstance(parallel, Ring):
                    kernels_of_ring(parallel)
                found += compiled(parallel)  # costly, and one group of ranks is enough
            of_step, of_round = whole_run(here, style, chats, shards)
            found += [("step", of_step, step), ("validation", of_round, metrics)]
            cases += [(f"{style}, {here.cp_size} ranks: {name}", ours, alone) for name, ours, alone in found]
    if mesh.rank == 0:
        torch.save(cases, out)
    dist.destroy_process_group()


def main() -> None:
    out, shards, port = sys.argv[1:]
    forking = multiprocessing.get_context("fork")  # everything is imported once
    ranks = [forking.Process(target=run_rank, args=(rank, out, Path(shards), port)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
