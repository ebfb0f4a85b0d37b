"""Adapters in our models, held against peft's own model of the same base."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from models.base import CausalLM
from models.batch import IGNORE_INDEX
from models.errors import AdapterError
from models.init import init_weights
from models.lora import adapter_rules, apply_lora, is_adapter

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapt(model: CausalLM, **changes: Any) -> CausalLM:
    options: dict[str, Any] = {"rank": 4, "alpha": 6.0, "dropout": 0.0, "target_modules": TARGETS}
    options |= {"modules_to_save": [], "seed": 0, "frozen_dtype": torch.float32}
    apply_lora(model, **options | changes)
    return model


def draw(model: CausalLM, seed: int = 0) -> None:
    rules = adapter_rules(model)
    parameters = model.canonical_parameters()
    init_weights({name: parameters[name].detach() for name in rules}, std=1.0, seed=seed, rules=rules)


def shake(model: nn.Module) -> None:
    """Adapters as after some training: B is not 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * 0.1)


def test_logits_and_gradients_are_those_of_peft(base_folder: Path, load_base: Any, make_batch: Any) -> None:
    ours = adapt(load_base(base_folder), modules_to_save=["lm_head", "model.norm"])
    draw(ours)
    shake(ours)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, modules_to_save=["lm_head", "model.norm"])
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base_folder), config)
    names = {
        name.removeprefix("base_model.model.").replace(".default", "").replace(".modules_to_save", ""): parameter
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    trained = {name: p for name, p in ours.canonical_parameters().items() if p.requires_grad}
    assert sorted(trained) == sorted(names)
    with torch.no_grad():
        for name, parameter in trained.items():
            names[name].copy_(parameter)

    batch = make_batch([[20]])
    logits = theirs(batch.input_ids).logits
    torch.testing.assert_close(ours.logits(batch), logits, rtol=1e-5, atol=1e-5)
    labels = batch.labels.flatten()
    nn.functional.cross_entropy(logits[0], labels, ignore_index=IGNORE_INDEX, reduction="sum").backward()
    ours(batch).loss.backward()
    for name, parameter in ours.canonical_parameters().items():
        if name in trained:
            torch.testing.assert_close(parameter.grad, names[name].grad, rtol=1e-5, atol=1e-5, msg=name)
        else:
            assert parameter.grad is None


def test_transformers_own_model_takes_the_same_adapters(base_folder: Path, load_base: Any, make_batch: Any) -> None:
    """With impl = "hf": the same names and values, dropout and recomputation included."""
    batch = make_batch([[9, 7], [4, 12]])
    found = []
    for impl in ("custom", "hf"):
        model = adapt(load_base(base_folder, impl=impl), dropout=0.2, modules_to_save=["lm_head"])
        draw(model)
        shake(model)
        model.apply_activation_checkpointing("full", 1)
        assert model.dropout is not None
        model.dropout.draw(1, 0, 0)
        model(batch).loss.backward()
        gradients = {name: p.grad for name, p in model.canonical_parameters().items() if p.grad is not None}
        found.append((gradients, model.flops(1, 1), model.count_parameters()))
    assert list(found[0][0]) == list(found[1][0])
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    assert found[0][1:] == found[1][1:]


def test_names_have_no_trace_of_wrappers(base_folder: Path, load_base: Any) -> None:
    plain = load_base(base_folder)
    before = dict(plain.named_parameters())
    model = adapt(plain)
    found = model.canonical_parameters()
    assert [name for name in found if not is_adapter(name)] == list(before)
    assert all(found[name] is parameter for name, parameter in before.items())
    layers = {name.rpartition(".lora_")[0] for name in found if is_adapter(name)}
    assert layers == {name.removesuffix(".weight") for name in before if name.removesuffix(".weight").endswith("_proj")}
    assert found["model.layers.1.mlp.down_proj.lora_A.weight"].shape == (4, 24)
    assert found["model.layers.1.mlp.down_proj.lora_B.weight"].shape == (16, 4)


def test_a_new_adapter_changes_nothing(base_folder: Path, load_base: Any, make_batch: Any) -> None:
    batch = make_batch([[5, 9]])
    expected = load_base(base_folder)(batch).loss
    model = adapt(load_base(base_folder))
    draw(model)
    assert torch.equal(model(batch).loss, expected)


def test_first_values_depend_on_seed_and_name_alone(base_folder: Path, load_base: Any) -> None:
    values = []
    for targets, dtype, seed in (
        (TARGETS, torch.float32, 0),
        (["o_proj"], torch.float64, 0),
        (["o_proj"], torch.float64, 1),
    ):
        model = adapt(load_base(base_folder, dtype), target_modules=targets)
        draw(model, seed)
        found = model.canonical_parameters()
        values.append(found["model.layers.1.self_attn.o_proj.lora_A.weight"].detach().float())
        assert not found["model.layers.1.self_attn.o_proj.lora_B.weight"].any()
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    bound = 1 / 16**0.5  # of peft: Kaiming with a = sqrt(5)
    assert 0.9 * bound < values[0].abs().max() <= bound
    expected = torch.empty(4, 16)
    nn.init.kaiming_uniform_(expected, a=5**0.5, generator=torch.Generator().manual_seed(0))
    assert 0.9 * bound < expected.abs().max() <= bound


def test_frozen_weights_have_the_compute_dtype(base_folder: Path, load_base: Any) -> None:
    model = adapt(load_base(base_folder), frozen_dtype=torch.bfloat16, modules_to_save=["embed_tokens"])
    for name, parameter in model.canonical_parameters().items():
        trained = is_adapter(name) or name == "model.embed_tokens.weight"
        assert parameter.requires_grad == trained
        assert parameter.dtype == (torch.float32 if trained else torch.bfloat16)


def test_counts_and_flops(base_folder: Path, load_base: Any) -> None:
    """Frozen matrices: 2 n forward and 2 n backward per token. Trained ones 6 n, as ever."""
    plain = load_base(base_folder)
    frozen = plain.matrix_shapes.block_params + plain.matrix_shapes.head_params
    before = plain.count_parameters()
    assert before.num_trainable_params == before.num_params
    attention = plain.flops(0, 7)
    model = adapt(load_base(base_folder))
    adapters = 2 * 4 * (3 * (16 + 24) + 2 * (16 + 16) + 2 * (16 + 8))  # layers, rank, inputs and outputs
    counts = model.count_parameters()
    assert counts.num_trainable_params == adapters
    assert counts.num_params == before.num_params + adapters
    assert counts.num_embedding_params == before.num_embedding_params
    assert model.flops(10, 7) == 10 * (4 * frozen + 6 * adapters) + attention
    assert model.flops_6dn(10) == plain.flops_6dn(10) - 10 * 2 * frozen + 10 * 6 * adapters
    assert adapt(load_base(base_folder), modules_to_save=["lm_head"]).flops(1, 0) - model.flops(1, 0) == 2 * 384 * 16


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        (
            {"target_modules": ["q_proj", "query"]},
            "target_modules",
            '"query" is no linear layer; there are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj',
        ),
        (
            {"target_modules": ["embed_tokens"]},
            "target_modules",
            '"embed_tokens" is model.embed_tokens, no linear layer',
        ),
        ({"target_modules": ["lm_head"]}, "target_modules", '"lm_head" is lm_head, no linear layer of a block'),
        ({"target_modules": ["mlp"]}, "target_modules", '"mlp" is model.layers.0.mlp, no linear layer of a block'),
        (
            {"modules_to_save": ["head"]},
            "modules_to_save",
            '"head" is no module; with weights there are down_proj, embed',
        ),
        (
            {"modules_to_save": ["self_attn"]},
            "modules_to_save",
            '"self_attn" is model.layers.0.self_attn, where model.lora.target_modules puts an adapter: model.layers.0.',
        ),
        ({"modules_to_save": ["model.rope"]}, "modules_to_save", '"model.rope" is'),
    ],
)
def test_what_cannot_be_adapted(base_folder: Path, load_base: Any, changes: Any, key: str, message: str) -> None:
    model = load_base(base_folder)
    before = list(dict(model.named_parameters()))
    with pytest.raises(AdapterError) as caught:
        adapt(model, **changes)
    assert caught.value.key == key
    assert caught.value.message.startswith(message)
    assert list(dict(model.named_parameters())) == before


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens", "model"])
def test_tied_matrices_stay_tied(tmp_path: Path, write_base: Callable[..., Path], load_base: Any, module: str) -> None:
    folder = write_base(tmp_path / "tied", dtype=torch.float32, tie_word_embeddings=True)
    with pytest.raises(AdapterError, match="embedding and head are one matrix here"):
        adapt(load_base(folder), modules_to_save=[module])
    assert adapt(load_base(folder)).flops(1, 0) > 0
