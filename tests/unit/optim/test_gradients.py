import pytest
import torch

from trainer.optim.gradients import clip_gradients, gradient_norms, parameter_group
from trainer.parallel.mesh import one_rank_mesh

ONE_RANK = one_rank_mesh(torch.device("cpu"))


def norms_of(gradients, nats=1.0, loss_tokens=4.0):
    return gradient_norms(
        gradients,
        torch.tensor(nats, dtype=torch.float64),
        torch.tensor(loss_tokens, dtype=torch.float64),
        ONE_RANK,
    )


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.layers.0.self_attn.q_proj.weight", "attention"),
        ("model.layers.0.self_attn.q_norm.weight", "norm"),
        ("model.layers.0.input_layernorm.weight", "norm"),
        ("model.layers.0.mlp.up_proj.weight", "mlp"),
        ("model.norm.weight", "norm"),
        ("lm_head.weight", "head"),
        ("something.else", "other"),
    ],
)
def test_groups(name, group):
    assert parameter_group(name) == group


def test_norms_are_global_and_per_group():
    gradients = {
        "model.embed_tokens.weight": torch.full((2, 2), 3.0),
        "model.layers.0.mlp.up_proj.weight": torch.full((4, 4), 2.0),
        "model.layers.1.mlp.up_proj.weight": torch.full((4, 4), 2.0),
    }
    norms = norms_of(gradients)
    assert norms.groups.keys() == {"embedding", "mlp"}
    assert norms.groups["embedding"].item() == 6.0
    assert norms.groups["mlp"].item() == pytest.approx(128**0.5)
    assert norms.total.item() == pytest.approx(164**0.5)
    assert norms.update_ok.item()


@pytest.mark.parametrize("bad", [{"nats": float("nan")}, {"nats": float("inf")}, {"loss_tokens": 0.0}])
def test_no_update_without_a_finite_loss(bad):
    assert not norms_of({"w": torch.ones(2)}, **bad).update_ok.item()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_update_without_finite_gradients(value):
    assert not norms_of({"w": torch.tensor([1.0, value])}).update_ok.item()


def test_clipping_scales_down_only():
    gradients = {"a": torch.full((4,), 3.0), "b": torch.full((4,), 4.0, dtype=torch.float64)}
    norms = norms_of(gradients)
    assert norms.total.item() == 10.0
    clip_gradients(gradients, norms.total, 20.0)
    assert gradients["a"][0].item() == 3.0
    clip_gradients(gradients, norms.total, 1.0)
    assert norms_of(gradients).total.item() == pytest.approx(1.0, rel=1e-6)
    zero = {"a": torch.zeros(3)}
    clip_gradients(zero, norms_of(zero).total, 1.0)
    assert zero["a"].tolist() == [0.0, 0.0, 0.0]


def test_norm_of_many_small_elements_is_exact():
    """An fp32 sum of squares, one by one, is off by 2e-4 here."""
    gradient = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert norms_of({"w": gradient}).total.item() == pytest.approx(gradient.double().norm().item(), rel=1e-9)
