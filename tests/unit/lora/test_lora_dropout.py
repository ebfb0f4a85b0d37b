"""Dropout of adapters: masks from keys, the same in every repeat, nowhere where nothing is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from models.layers.dropout import DropoutKeys, SeededDropout
from models.lora import apply_lora

TARGETS = ["q_proj", "v_proj", "down_proj"]


def layers(count: int = 2, p: float = 0.25) -> tuple[DropoutKeys, list[SeededDropout]]:
    keys = DropoutKeys(count, seed=5)
    return keys, keys.layers(p)


def test_masks_follow_from_seed_place_and_layer() -> None:
    keys, (first, second) = layers()
    hidden = torch.ones(64, 64)
    keys.draw(3, 0, 1)
    mask = first(hidden)
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(float((mask == 0).float().mean()) - 0.25) < 0.02
    assert torch.equal(first(hidden), mask)  # as activation checkpointing asks again
    assert not torch.equal(second(hidden), mask)
    for place in ((3, 0, 2), (3, 1, 1), (4, 0, 1)):
        keys.draw(*place)
        assert not torch.equal(first(hidden), mask)
    other, (same, _) = layers()
    other.draw(3, 0, 1)
    assert torch.equal(same(hidden), mask)
    another = DropoutKeys(2, seed=6)
    another.draw(3, 0, 1)
    assert not torch.equal(another.layers(0.25)[0](hidden), mask)


def test_no_global_random_state_is_touched() -> None:
    keys, (layer, _) = layers()
    before = torch.get_rng_state()
    keys.draw(0)
    layer(torch.ones(8, 8, requires_grad=True)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_go_where_values_went() -> None:
    keys, (layer, _) = layers()
    keys.draw(1)
    hidden = torch.full((32, 8), 2.0, requires_grad=True)
    out = layer(hidden)
    out.sum().backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, out.detach() / 2)


def test_only_training_drops() -> None:
    _, (layer, _) = layers()
    hidden = torch.ones(8, 8)
    with pytest.raises(RuntimeError, match=r"before DropoutKeys\.draw"):
        layer(hidden)
    with torch.no_grad():
        assert layer(hidden) is hidden
    assert layer.eval()(hidden) is hidden


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_activations_have_the_same_mask(
    base_folder: Path, load_base: Any, make_batch: Any, mode: str
) -> None:
    batch = make_batch([[9, 7], [4, 12]])
    gradients = []
    for recompute in (False, True):
        model = load_base(base_folder)
        apply(model)
        if recompute:
            model.apply_activation_checkpointing(mode, 1)
        model.dropout.draw(7, 0, 0)
        model(batch).loss.backward()
        gradients.append({name: p.grad for name, p in model.canonical_parameters().items() if p.grad is not None})
    assert len(gradients[0]) == 12
    assert all(torch.equal(gradients[1][name], gradient) for name, gradient in gradients[0].items())


def apply(model: Any, dropout: float = 0.3) -> None:
    options: dict[str, Any] = {"rank": 2, "alpha": 4.0, "dropout": dropout, "target_modules": TARGETS}
    apply_lora(model, **options, modules_to_save=[], seed=1, frozen_dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3, generator=generator)


def test_compiled_blocks_share_graphs_whatever_the_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_base: Any, load_base: Any, make_batch: Any
) -> None:
    """No break, and the values of eager. One graph for the first block, whose input needs no gradient, one for all
    others; the keys of layers and steps are inputs."""
    folder = write_base(tmp_path / "base", dtype=torch.float32, num_hidden_layers=4)
    counter = CompileCounterWithBackend("aot_eager")
    real = torch.compile

    def without_inductor(function: Any, *, mode: str, **options: Any) -> Any:
        return real(function, backend=counter, **options)

    monkeypatch.setattr(torch, "compile", without_inductor)
    batch = make_batch([[16]])
    results = []
    for compiled in (False, True):
        model = load_base(folder)
        apply(model)
        if compiled:
            torch._dynamo.reset()
            model.compile_blocks("default", fullgraph=True)
        found = []
        for step in range(2):
            model.dropout.draw(step, 0, 0)
            model(batch).loss.backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append(found)
    assert counter.frame_count == 2
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    half = len(results[0]) // 2
    assert not torch.equal(results[0][0], results[0][half])
