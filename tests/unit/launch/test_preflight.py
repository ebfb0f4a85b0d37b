"""The plan of a run, and what is refused before anything is started."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.errors import ConfigError
from configs.sft import SFTConfig
from trainer.data.row import Rows
from trainer.preflight import Plan, memory_lines, plan_run, preflight, preflight_scoring
from trainer.preflight.inputs import prepare
from trainer.preflight.memory import lever_faults

_ARCH = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


class _Rows:
    """A source of which only the number of rows counts."""

    seq_len, full_rows, fingerprint, description = 8, True, {}, "100 made-up rows"

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def fill(self, epoch: int, indices: np.ndarray, out: Rows) -> None:
        raise AssertionError("a plan reads no row")


def _config(**values: Any) -> SFTConfig:
    data = {"type": "fake", "seq_len": 8, "batch_size": 6, "micro_batch_size": 1} | values.pop("data", {})
    base = {"data": data, "model": {"arch": _ARCH, "init": {}}, "max_steps": 5, "run": {"name": "one"}}
    return SFTConfig.model_validate(base | values)


def test_plan_counts_tokens_steps_and_epochs() -> None:
    plan = plan_run(_config(data={"micro_batch_size": 2}, max_steps=50), _Rows(100), 3)
    assert plan == Plan(
        steps=50,
        rows_per_step=6,
        tokens_per_step=48,
        num_rows=100,
        epochs=3.0,
        world_size=3,
        grad_accum_steps=1,
        data="100 made-up rows",
    )
    assert plan.lines() == [
        "data: 100 made-up rows",
        "plan: 50 steps of 6 rows (48 tokens), 2,400 tokens in all, 3 epochs of 100 rows",
        "plan: 3 workers, 1 micro-batch per worker and step",
    ]


def test_plan_shows_how_the_workers_share_weights_and_rows() -> None:
    def workers(**model: Any) -> str:
        config = _config(data={"batch_size": 8}, model={"arch": _ARCH, "init": {}} | model)
        return plan_run(config, _Rows(100), 8).lines()[2]

    assert workers() == "plan: 8 workers, 1 micro-batch per worker and step"
    assert workers(dp_replicate=2, cp=2) == (
        "plan: 8 workers (2 replicas x 2 shards x 2 shares of a row), 2 micro-batches per worker and step"
    )
    assert workers(dp_replicate=8) == "plan: 8 workers (8 replicas), 1 micro-batch per worker and step"
    assert workers(cp=4) == "plan: 8 workers (2 shards x 4 shares of a row), 4 micro-batches per worker and step"


@pytest.mark.parametrize(("max_epochs", "steps"), [(1, 16), (2, 33), (3, 50)])
def test_without_max_steps_the_run_takes_all_whole_steps_of_its_epochs(max_epochs: int, steps: int) -> None:
    """Field case R56 (planning): the planned steps are exact numbers of known rows, not estimates."""
    config = _config(max_steps=None, data={"max_epochs": max_epochs})
    plan = plan_run(config, _Rows(100), 1)
    assert plan.steps == steps == (max_epochs * 100) // 6
    assert plan.epochs == steps * 6 / 100
    assert plan.grad_accum_steps == 6


def test_more_steps_than_the_epochs_allow_are_refused() -> None:
    plan_run(_config(max_steps=33, data={"max_epochs": 2}), _Rows(100), 1)
    with pytest.raises(ConfigError) as error:
        plan_run(_config(max_steps=34, data={"max_epochs": 2}), _Rows(100), 1)
    assert str(error.value) == (
        "max_steps: 34 steps read the data 2.04 times, and data.max_epochs = 2 allows 33 steps (100 rows, 6 per step)"
    )


def test_data_for_less_than_one_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.batch_size: not one step: data.max_epochs = 1 of 5 rows is less"):
        plan_run(_config(max_steps=None, data={"max_epochs": 1}), _Rows(5), 1)


def test_no_steps_are_a_plan_when_asked_for() -> None:
    assert plan_run(_config(max_steps=0, data={"max_epochs": 1}), _Rows(5), 1).steps == 0


def test_a_batch_that_does_not_divide_over_the_workers_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        plan_run(_config(data={"micro_batch_size": 2}), _Rows(100), 4)
    assert [fault.key for fault in error.value.faults] == ["data.batch_size"]
    assert "2 x 4" in str(error.value)


def _faults(config: SFTConfig, tmp_path: Path, world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as error:
        preflight(config, run_dir=tmp_path / "one", world_size=world_size, say=print)
    return [fault.key for fault in error.value.faults]


def test_preflight_gives_the_plan_of_a_sound_run(tmp_path: Path) -> None:
    assert preflight(_config(), run_dir=tmp_path / "one", world_size=2, say=print).steps == 5


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"model": {"arch": _ARCH | {"num_key_value_heads": 3}}}, ["model.arch.num_key_value_heads"]),
        ({"model": {"arch": _ARCH | {"hidden_sizes": 3}}}, ["model.arch.hidden_sizes"]),
        ({"model": {"arch": {"model_type": "nonsense"}}}, ["model.arch.model_type"]),
        ({"tokenizer": {"name": "./nowhere"}}, ["tokenizer.name"]),
        ({"data": {"type": "tokens", "paths": ["nowhere"]}}, ["tokenizer.name"]),
        ({"resume": {}}, ["resume"]),
        (
            {
                "max_steps": None,
                "data": {"max_epochs": 1, "num_rows": 60},
                "scheduler": {"type": "linear", "warmup_steps": 11},
            },
            ["scheduler.warmup_steps"],
        ),
    ],
)
def test_preflight_names_the_key_at_fault(tmp_path: Path, values: dict[str, Any], keys: list[str]) -> None:
    assert _faults(_config(**values), tmp_path) == keys


def test_preflight_shows_all_faults_at_once(tmp_path: Path) -> None:
    assert _faults(_config(resume={}), tmp_path, world_size=4) == ["data.batch_size", "resume"]


def test_held_out_shards_are_checked(
    tmp_path: Path, tiny_tokenizer: Path, tiny_shards: Path, tiny_heldout: Path
) -> None:
    def config(folder: Path) -> SFTConfig:
        return _config(
            data={"type": "tokens", "paths": [tiny_shards]},
            model={"arch": _ARCH | {"vocab_size": 384}},
            tokenizer={"name": str(tiny_tokenizer)},
            val={"interval": 5, "sets": [{"name": "held", "path": folder}]},
        )

    assert preflight(config(tiny_heldout), run_dir=tmp_path, world_size=1, say=print).steps == 5
    (tmp_path / "empty").mkdir()
    assert _faults(config(tmp_path / "empty"), tmp_path) == ["val.sets"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_levers_that_relieve_a_gpu_are_refused_without_one(
    tmp_path: Path, tiny_heldout: Path, tiny_tokenizer: Path
) -> None:
    """Scoring keeps no activations and has no moments, so there only FSDP's weights on the host are anything."""
    levers = {"ac_offloading": {}, "fsdp_cpu_offload": True}
    model = {"model": {"arch": _ARCH, "init": {}} | levers}
    with pytest.raises(ConfigError) as of_training:
        preflight(_config(**model), run_dir=tmp_path, world_size=2, say=print)
    assert [fault.key for fault in of_training.value.faults] == ["model.ac_offloading", "model.fsdp_cpu_offload"]
    assert "there is no GPU here" in of_training.value.faults[0].message
    assert list(lever_faults(_config(**model, slurm={}))) == []  # a job's nodes may
    val = {"sets": [{"name": "held", "path": str(tiny_heldout)}], "seq_lens": [8]}
    model["model"]["arch"] = _ARCH | {"vocab_size": 384}
    config = _config(**model, val=val, max_steps=0, tokenizer={"name": str(tiny_tokenizer)})
    with pytest.raises(ConfigError) as of_scoring:
        preflight_scoring(config, run_dir=tmp_path, world_size=2, say=print)
    assert [fault.key for fault in of_scoring.value.faults] == ["model.fsdp_cpu_offload"]


def test_memory_beside_what_a_gpu_has() -> None:
    config = _config()
    inputs, plan = prepare(config), plan_run(config, _Rows(100), 1)
    alone = memory_lines(config, inputs, plan)
    assert alone[0].startswith("memory: about ") and "has" not in alone[-1]
    assert memory_lines(config, inputs, plan, capacity=2**40) == [*alone, "memory: the GPU has 1024.0 GiB"]
    assert memory_lines(config, inputs, plan, capacity=2**20)[-1].startswith("memory: likely not enough")
