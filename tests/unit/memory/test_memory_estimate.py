"""The estimate of peak memory: sizes counted by hand for a tiny model, and what each lever takes away."""

import pytest
import torch
from torch import fx

from configs.model import ModelConfig
from models.layers.block import RecomputeMode
from models.registry import build_config, build_model
from trainer.memory import MemoryEstimate, RankShape, estimate_memory
from trainer.memory.block import measure_block
from trainer.memory.graph import extra_bytes
from trainer.optim.offloaded_adamw import NUM_SLOTS

HIDDEN, MLP, LAYERS, VOCAB, ROWS, SEQ_LEN = 64, 160, 6, 512, 2, 128
TOKENS = ROWS * SEQ_LEN
ARCH = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
BLOCK = HIDDEN * (2 * HIDDEN + 2 * HIDDEN // 2 + 3 * MLP) + 2 * HIDDEN
PARAMS = LAYERS * BLOCK + VOCAB * HIDDEN + HIDDEN

# Per token, in bf16: input, normed input, q, k, v, attended, residual, normed again; gate, its SiLU, up, their product;
# in fp32: a number each of the two norms, and of each head of the attention.
SAVED_EAGER = 2 * (6 * HIDDEN + 2 * HIDDEN // 2 + 4 * MLP) + 4 * (2 + 4)


def meta_model(ac: RecomputeMode | None = None):
    with torch.device("meta"):
        model = build_model(
            build_config(ARCH, tokenizer_length=None, special_ids={}),
            seq_len=SEQ_LEN,
            attn="sdpa",
            dtype=torch.bfloat16,
            impl="auto",
        )
    if ac is not None:
        model.apply_activation_checkpointing(ac, 1)
    return model


def estimate(*, accum: int = 2, world_size: int = 1, dp_replicate: int = 1, **model):
    config = ModelConfig.model_validate({"arch": ARCH, "init": {}} | model)
    shape = RankShape(
        rows=ROWS, seq_len=SEQ_LEN, grad_accum_steps=accum, world_size=world_size, dp_replicate=dp_replicate
    )
    return estimate_memory(config, meta_model(), shape)


def test_what_a_block_keeps():
    plain = measure_block(meta_model(), 1, rows=ROWS, seq_len=SEQ_LEN, compiled=False)
    assert plain.saved == TOKENS * SAVED_EAGER
    # Cosines and sines of 8 frequencies, and the borders of the documents on both sides.
    assert plain.context == 2 * TOKENS * 8 * 4 + 2 * 4 * (ROWS + 1)
    full = measure_block(meta_model("full"), 1, rows=ROWS, seq_len=SEQ_LEN, compiled=False)
    assert full.saved == TOKENS * HIDDEN * 2
    # It is all made again, but for the input.
    assert full.backward > plain.saved - full.saved
    assert plain.backward < full.backward < plain.saved + plain.backward + 2 * BLOCK


@pytest.mark.parametrize("ac", [None, "full"])
def test_what_a_compiled_block_keeps(ac):
    memory = measure_block(meta_model(ac), 1, rows=ROWS, seq_len=SEQ_LEN, compiled=True)
    hidden = TOKENS * HIDDEN * 2
    if ac == "full":
        assert memory.saved == hidden
    else:
        assert TOKENS * 2 * (6 * HIDDEN + 2 * MLP) < memory.saved < TOKENS * SAVED_EAGER
    assert memory.backward > hidden


def test_weights_and_optimizer_state_are_exact():
    parts = estimate().parts
    assert parts["master weights"] == 4 * PARAMS
    assert parts["their copies for computing"] == 2 * PARAMS
    assert parts["optimizer moments"] == 8 * PARAMS
    sharded = estimate(world_size=4, dp_replicate=2).parts
    assert sharded["master weights"] == 2 * PARAMS
    assert sharded["optimizer moments"] == 4 * PARAMS
    assert sharded["their copies for computing"] == 0
    assert sharded["gathered weights"] == 2 * (PARAMS - LAYERS * BLOCK + 1 * BLOCK)


@pytest.mark.parametrize(
    ("model", "accum", "gathered", "gradients"),
    [
        ({}, 2, PARAMS - (LAYERS - 1) * BLOCK, 4 * PARAMS // 2),
        ({"reshard_after_forward": False}, 2, PARAMS, 4 * PARAMS // 2),
        ({"defer_grad_sync": True}, 2, PARAMS, 4 * PARAMS // 2 + 4 * PARAMS),
        ({"defer_grad_sync": True}, 1, PARAMS - (LAYERS - 1) * BLOCK, 0),
        ({"defer_replicate_sync": True}, 2, PARAMS - (LAYERS - 1) * BLOCK, 4 * PARAMS // 2 + 4 * PARAMS // 2),
    ],
)
def test_what_fsdp_holds_in_the_head(model, accum, gathered, gradients):
    """Two shards of two replicas: weights gathered in bf16, gradients of each element in fp32."""
    found = estimate(accum=accum, world_size=4, dp_replicate=2, **model)
    assert found.moment == "in the head"
    assert found.parts["gathered weights"] == 2 * gathered
    assert found.parts["gradients"] == gradients


def test_what_the_levers_take_away():
    plain = estimate()
    moved = estimate(optim_cpu_offload=True)
    largest = max(VOCAB * HIDDEN, MLP * HIDDEN)
    assert moved.parts["optimizer moments"] == NUM_SLOTS * 2 * 4 * largest
    narrow = estimate(optimization_dtype="bfloat16").parts
    assert (narrow["master weights"], narrow["their copies for computing"]) == (2 * PARAMS, 0)
    assert narrow["gradients"] >= 4 * PARAMS
    assert estimate(world_size=2, fsdp_cpu_offload=True).parts["master weights"] == 0
    offloaded = estimate(ac_offloading={"max_inflight_activations": 1})
    fewer = (LAYERS - 2) * TOKENS * SAVED_EAGER
    assert plain.parts["activations"] - offloaded.parts["activations"] == fewer
    # With one micro-batch there is most where nearly all gradients are, and the next blocks' activations are back.
    assert estimate(accum=1, ac_offloading={"max_inflight_activations": 1}).moment.endswith("first block")
    back = estimate(accum=1, ac_offloading={"max_inflight_activations": 1}, ac={"mode": "full"})
    assert back.parts["activations"] >= 2 * 2 * HIDDEN * TOKENS
    every_second = estimate(ac={"mode": "full", "freq": 2})
    kept = LAYERS // 2 * TOKENS * (SAVED_EAGER + 2 * HIDDEN)
    assert 0 <= every_second.parts["activations"] - kept <= 2 * TOKENS * HIDDEN * 2


def test_one_micro_batch_has_no_sums_of_gradients_in_the_head():
    assert estimate(accum=1).parts["gradients"] == 0
    assert estimate(accum=2).parts["gradients"] == 4 * PARAMS


def test_shares_of_a_row_are_shares_of_the_activations():
    whole, half = estimate(world_size=2), estimate(world_size=2, cp=2)
    assert half.parts["activations"] * 2 == whole.parts["activations"]


def test_moments_of_adapters_on_the_host_have_small_slots():
    """Frozen matrices are larger, and have none. They lie in the compute dtype."""
    model = meta_model()
    model.requires_grad_(False)
    model.blocks[0].get_submodule("self_attn.k_proj").requires_grad_()
    config = ModelConfig.model_validate({"arch": ARCH, "init": {}, "optim_cpu_offload": True})
    found = estimate_memory(config, model, RankShape(rows=ROWS, seq_len=SEQ_LEN, grad_accum_steps=1))
    assert found.parts["optimizer moments"] == NUM_SLOTS * 2 * 4 * (HIDDEN * HIDDEN // 2)
    assert found.parts["master weights"] == 4 * HIDDEN * HIDDEN // 2
    assert found.parts["frozen weights"] == 2 * (PARAMS - HIDDEN * HIDDEN // 2)
    assert found.moment == "in the head"
    # Logits in fp32 beside the product in bf16, the gradient of the hidden states, and none of the head's weight.
    assert found.parts["logits and gradients of the head"] == TOKENS * VOCAB * (4 + 2) + TOKENS * HIDDEN * 2


@pytest.mark.parametrize(("size", "shown"), [(2**29, "1.5 GiB"), (2**19, "1.5 MiB")])
def test_the_table_adds_up(size, shown):
    found = MemoryEstimate(moment="in the head", parts={"weights": size, "none": 0, "rest": 2 * size})
    unit = shown[-3:]
    assert found.total == 3 * size
    assert found.lines() == [
        f"memory: about {shown} on each GPU, most of it in the head",
        f"memory:   weights      0.50 {unit}",
        f"memory:   rest         1.00 {unit}",
    ]


def add_node(graph: fx.Graph, op, *args, size: int) -> fx.Node:
    """A square matrix; a placeholder where `op` is None."""
    node = graph.placeholder(f"input_{size}_{len(graph.nodes)}") if op is None else graph.call_function(op, args)
    node.meta["val"] = torch.empty((size, size), device="meta")
    return node


def test_fused_tensors_take_no_memory():
    """a @ b, then relu, then sigmoid, then @ b: the ReLU is never written, its sigmoid is, over the first product."""
    graph, aten = fx.Graph(), torch.ops.aten
    a, b = (add_node(graph, None, size=10) for _ in range(2))
    product = add_node(graph, aten.mm.default, a, b, size=10)
    relu = add_node(graph, aten.relu.default, product, size=10)
    sigmoid = add_node(graph, aten.sigmoid.default, relu, size=10)
    last = add_node(graph, aten.mm.default, sigmoid, b, size=1)
    # The first product beside `a`, which is gone after it.
    graph.output((last,))
    assert extra_bytes(graph) == 10 * 10 * 4
    # `a` stays, so the second product comes in addition.
    graph.erase_node(next(node for node in graph.nodes if node.op == "output"))
    graph.output((last, a))
    assert extra_bytes(graph) == 10 * 10 * 4 + 4


def test_what_kernels_of_their_own_read_and_write_is_in_memory():
    """Two ReLUs: one is fused into a sum, the other must be written for an operator that torch does not know."""
    graph, aten = fx.Graph(), torch.ops.aten
    a = add_node(graph, None, size=10)
    fused = add_node(graph, aten.relu.default, a, size=8)
    read = add_node(graph, aten.relu.default, a, size=6)
    made = add_node(graph, torch.ops.oneloop.norm_outline.default, read, a, size=4)
    total = add_node(graph, aten.sum.default, fused, made, size=2)
    graph.output((total, a))
    assert extra_bytes(graph) == 4 * (6 * 6 + 4 * 4)
