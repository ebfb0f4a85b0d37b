"""Runs with [model.lora]: what is trained, what is kept, what a checkpoint holds, what it can be gone on with by."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.errors import ConfigError
from configs.model import ModelConfig
from configs.sft import SFTConfig
from models.hf_config import read_config
from models.layers.dropout import DropoutKeys
from models.lora import is_adapter
from trainer.checkpoint.manifest import read_checkpoint
from trainer.micro_batch import run_micro_batches
from trainer.model_setup import build_parallel_model, set_first_weights
from trainer.optim.adamw import AdamW
from trainer.parallel.mesh import one_rank_mesh
from trainer.preflight import preflight

MESH = one_rank_mesh(torch.device("cpu"))


def column(run_dir: Path, name: str) -> list[Any]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


def test_frozen_weights_cost_their_compute_dtype_only(base_folder: Path) -> None:
    """At one rank: no master, no gradient, no optimizer state; bf16 weights under fp32 adapters."""
    config = ModelConfig.model_validate({"name": str(base_folder), "lora": {"rank": 4}})
    model, grad_sync = build_parallel_model(config, read_config(base_folder), seq_len=8, mesh=MESH)
    set_first_weights(config, model, grad_sync, MESH, folder=base_folder)
    optimizer = AdamW(SFTConfig.model_fields["optim"].default, grad_sync.masters, dict.fromkeys(grad_sync.masters, 2))
    num_adapters, num_base = 1856, 2 * 384 * 16 + 2 * (3 * 16 * 24 + 2 * 16 * 16 + 2 * 16 * 8 + 2 * 16 + 2 * 8) + 16
    assert sum(master.numel() for master in grad_sync.masters.values()) == num_adapters
    assert {master.dtype for master in grad_sync.masters.values()} == {torch.float32}
    assert sum(tensor.numel() for tensor in grad_sync.frozen.values()) == num_base
    assert {tensor.dtype for tensor in grad_sync.frozen.values()} == {torch.bfloat16}
    moments = optimizer.moments()
    assert all(sum(moment.numel() for moment in kind.values()) == num_adapters for kind in moments.values())
    # All that the model holds: the base once, and the adapters' copies in the compute dtype.
    assert sum(parameter.nbytes for parameter in model.parameters()) == 2 * (num_base + num_adapters)
    storages = {
        parameter.untyped_storage().data_ptr() for parameter in model.parameters() if not parameter.requires_grad
    }
    assert storages == {tensor.untyped_storage().data_ptr() for tensor in grad_sync.frozen.values()}


def test_ranks_that_share_rows_draw_masks_of_their_own(
    base_folder: Path, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.model_validate({"name": str(base_folder), "lora": {"rank": 4, "dropout": 0.1}})
    model, grad_sync = build_parallel_model(config, read_config(base_folder), seq_len=16, mesh=MESH)
    set_first_weights(config, model, grad_sync, MESH, folder=base_folder)
    drawn: list[tuple[int, ...]] = []
    real = DropoutKeys.draw
    monkeypatch.setattr(DropoutKeys, "draw", lambda keys, *place: (drawn.append(place), real(keys, *place))[1])
    batches = [make_batch([[16]], seed=seed) for seed in range(2)]
    for rank in (2, 3):
        sharing = replace(MESH, rank=rank, dp_rank=1, cp_rank=rank - 2, cp_size=2)
        run_micro_batches(model, batches, 16, grad_sync, sharing, step=5)
    assert drawn == [(5, 2, 0), (5, 2, 1), (5, 3, 0), (5, 3, 1)]


def test_three_steps_leave_the_base_as_it_was(base_folder: Path, make_batch: Any) -> None:
    config = ModelConfig.model_validate({"name": str(base_folder), "lora": {"rank": 4, "dropout": 0.1}})
    model, grad_sync = build_parallel_model(config, read_config(base_folder), seq_len=16, mesh=MESH)
    set_first_weights(config, model, grad_sync, MESH, folder=base_folder)
    dims = {name: parameter.dim() for name, parameter in model.canonical_parameters().items()}
    optimizer = AdamW(SFTConfig.model_fields["optim"].default, grad_sync.masters, dims)
    base = {name: tensor.clone() for name, tensor in grad_sync.frozen.items()}
    adapters = {name: tensor.clone() for name, tensor in grad_sync.masters.items()}
    for step in range(3):
        batch = make_batch([[16]], seed=step)
        run_micro_batches(model, [batch], batch.num_loss_tokens, grad_sync, MESH, step=step)
        assert set(grad_sync.gradients()) == set(adapters)
        optimizer.step(grad_sync.gradients(), 1e-2, torch.tensor(True))
        grad_sync.clear_gradients()
        grad_sync.publish()
    assert all(torch.equal(grad_sync.frozen[name], tensor) for name, tensor in base.items())
    assert not any(torch.equal(grad_sync.masters[name], tensor) for name, tensor in adapters.items())
    parameters = model.canonical_parameters()
    assert all(parameter.grad is None for parameter in parameters.values())
    copies = {name: parameters[name] for name in adapters}
    assert all(torch.equal(copy, grad_sync.masters[name].bfloat16()) for name, copy in copies.items())


def test_a_checkpoint_holds_what_is_trained(train_lora: Callable[..., Path], base_folder: Path) -> None:
    """No name of a wrapper, no tensor of the base; its name and fingerprint."""
    run_dir = train_lora("whole", lora={"modules_to_save": ["lm_head"]})
    manifest, metadata = read_checkpoint(run_dir / "checkpoints" / "step_4")
    names = [name for name in metadata.state_dict_metadata if name.startswith("model.")]
    assert len(names) == 29
    assert [name for name in names if not is_adapter(name)] == ["model.lm_head.weight"]
    bare = {name.removeprefix("model.") for name in names}
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.step")
    assert set(metadata.state_dict_metadata) == {f"{kind}.{name}" for kind in kinds for name in bare}
    assert not [name for name in bare if "base_layer" in name or "default" in name]
    adapters = manifest["state"]["model"]["adapters"]
    assert adapters["base"] == str(base_folder)
    assert len(adapters["fingerprint"]) == 16
    assert column(run_dir, "params/num_trainable_params") == [1856 + 384 * 16]


def test_micro_batches_change_nothing_without_dropout(train_lora: Callable[..., Path]) -> None:
    data = {"type": "fake", "seq_len": 8, "batch_size": 4, "num_rows": 100, "num_workers": 0}
    losses = [
        column(train_lora(f"split_{size}", data=data | {"micro_batch_size": size}), "loss/mean") for size in (1, 4)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert min(abs(a - b) for a, b in zip(losses[0], losses[0][1:], strict=False)) > 1e-3


def test_a_resumed_run_draws_the_same_dropout(train_lora: Callable[..., Path]) -> None:
    """Bit for bit, repeated and resumed; another seed draws other masks."""
    lora = {"dropout": 0.2}
    first, again = train_lora("first", lora=lora), train_lora("again", lora=lora)
    whole = column(first, "digest/params")
    assert len(whole) == 4
    assert column(again, "digest/params") == whole
    other = train_lora("other", lora=lora | {"seed": 1})
    assert column(other, "digest/params")[0] != whole[0]
    half = first.parent / "half"
    shutil.copytree(first / "checkpoints" / "step_2", half / "checkpoints" / "step_2")
    train_lora("half", lora=lora, resume={"step": 2})
    assert column(half, "digest/params") == whole[1:]
    assert column(half, "loss/mean") == column(first, "loss/mean")[1:]


@pytest.fixture(scope="module")
def adapted(train_lora: Callable[..., Path]) -> Path:
    return train_lora("adapted", max_steps=2)


def faults(config: dict[str, Any], run_dir: Path) -> list[tuple[str, str]]:
    values = {"data": {"type": "fake", "seq_len": 8, "batch_size": 4}, "max_steps": 10, "run": {"name": "adapted"}}
    with pytest.raises(ConfigError) as caught:
        preflight(SFTConfig.model_validate(values | config), run_dir=run_dir, world_size=1, say=lambda text: None)
    return [(fault.key, fault.message) for fault in caught.value.faults]


def resume(base: Path, lora: dict[str, Any] | None) -> dict[str, Any]:
    model = {"name": str(base), "compute_dtype": "float32", "lora": lora}
    return {"model": model, "resume": {}, "ckpt": {"skip_dataloader": True}}


SAME: dict[str, Any] = {"rank": 4, "alpha": 6.0, "modules_to_save": ["lm_head"]}


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        (None, [("model.lora", "is missing: {path} holds adapters of {base}, not a whole model")]),
        (SAME | {"rank": 8}, [("model.lora.rank", "8 here, and 4 in {path}: other adapters")]),
        (
            SAME | {"alpha": 4.0, "modules_to_save": []},
            [
                ("model.lora.alpha", "4.0 here, and 6.0 in {path}: other adapters"),
                ("model.lora.modules_to_save", "[] here, and ['lm_head'] in {path}: other adapters"),
            ],
        ),
        (SAME | {"target_modules": ["q_proj"]}, [("model.lora.target_modules", "['q_proj'] here, and ['q_proj', 'k_")]),
    ],
)
def test_other_adapters_cannot_go_on(adapted: Path, base_folder: Path, lora: Any, expected: Any) -> None:
    path = adapted / "checkpoints" / "step_2"
    found = faults(resume(base_folder, lora), adapted)
    assert [key for key, _ in found] == [key for key, _ in expected]
    for (_, message), (_, start) in zip(found, expected, strict=True):
        assert message.startswith(start.format(path=path, base=base_folder))


def test_the_same_adapters_in_another_order_can(adapted: Path, base_folder: Path, train_lora: Any) -> None:
    targets = ["down_proj", "up_proj", "gate_proj", "o_proj", "v_proj", "k_proj", "q_proj"]
    config = resume(base_folder, SAME | {"target_modules": targets, "dropout": 0.5})
    values = {"data": {"type": "fake", "seq_len": 8, "batch_size": 4}, "max_steps": 10, "run": {"name": "adapted"}}
    preflight(SFTConfig.model_validate(values | config), run_dir=adapted, world_size=1, say=lambda text: None)


def test_another_base_is_refused(
    adapted: Path, write_base: Callable[..., Path], tmp_path: Path, train_lora: Any
) -> None:
    """At start, and again in the worker, which may see another folder."""
    other = write_base(tmp_path / "other", dtype=torch.bfloat16)
    config = resume(other, SAME)
    ((key, message),) = faults(config, adapted)
    assert key == "model.name"
    assert message.startswith(f"the weights of {other} are not those that the adapters of {adapted}")
    with pytest.raises(ConfigError, match="are not those that the adapters"):
        train_lora("adapted", model={"name": str(other)}, resume={})


def test_a_whole_model_does_not_become_adapters(train_lora: Callable[..., Path], base_folder: Path) -> None:
    run_dir = train_lora("no_lora", model={"lora": None}, max_steps=2)
    ((key, message),) = faults(resume(base_folder, SAME), run_dir)
    assert key == "model.lora"
    assert message.startswith(f"{run_dir / 'checkpoints' / 'step_2'} holds a whole model, no adapters")


@pytest.mark.parametrize(
    ("model", "key", "start"),
    [
        ({"init": {}}, "model.lora", "goes beside weights that are there, and [model.init] draws them anew"),
        ({"name": None, "arch": {"model_type": "llama"}}, "model.lora", "goes beside weights that are there: give"),
        ({"debug": {"num_layers": 1}}, "model.debug.num_layers", "leaves adapters that fit no whole model"),
    ],
)
def test_tables_that_do_not_go_together(base_folder: Path, model: Any, key: str, start: str) -> None:
    values = {"model": {"name": str(base_folder), "lora": {}} | model, "data": {"type": "fake"}, "max_steps": 1}
    with pytest.raises(ValueError, match=key.rpartition(".")[2]) as caught:
        SFTConfig.model_validate(values)
    assert start in str(caught.value)


def test_targets_are_checked_before_anything_starts(base_folder: Path, tmp_path: Path) -> None:
    config = {"model": {"name": str(base_folder), "lora": {"target_modules": ["qkv"]}}}
    ((key, message),) = faults(config, tmp_path)
    assert key == "model.lora.target_modules"
    assert (
        message == '"qkv" is no linear layer; there are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj'
    )


def test_the_vocabulary_of_the_base_stays(
    write_base: Callable[..., Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "small", dtype=torch.float32, vocab_size=256)
    config = {"model": {"name": str(base), "lora": {}}, "tokenizer": {"name": str(tiny_tokenizer)}}
    found = faults(config, tmp_path)
    assert [key for key, _ in found] == ["tokenizer.name"]
    assert "has more ids than the 256 rows" in found[0][1]
