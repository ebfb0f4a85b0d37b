"""`model.name` at the start of a run: what describes the model, what it is read from, and what does not go together."""

import json
import shutil

import pytest

from configs.checks import check_weights
from configs.errors import ConfigError
from configs.model import ModelConfig, is_hub_id
from trainer.preflight import preflight, prepare
from trainer.run_dir import fill_run_name


@pytest.fixture
def faults(tmp_path, run_config):
    """faults(**tables): what preflight finds, by key."""

    def find(**tables) -> dict[str, str]:
        with pytest.raises(ConfigError) as error:
            preflight(run_config(**tables), run_dir=tmp_path / "runs" / "one", world_size=1, say=print)
        return {fault.key: fault.message for fault in error.value.faults}

    return find


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("gpt2", True),
        ("Qwen/Qwen3-0.6B", True),
        ("owner/model.v1_2", True),
        ("./x", False),
        ("../x", False),
        ("/x/y", False),
        ("~/x", False),
        ("a/b/c", False),
        ("a b", False),
        ("owner/../x", False),
        ("owner/", False),
        ("", False),
    ],
)
def test_what_can_be_an_id_on_the_hub(name, is_id):
    assert is_hub_id(name) is is_id


ARCH = {"model_type": "llama"}


@pytest.mark.parametrize(
    ("model", "resuming", "keys"),
    [
        ({"name": "some/model"}, False, []),
        ({"name": "some/model", "init": {}}, False, []),
        ({"name": "some/model"}, True, []),
        ({"name": "some/model", "debug": {"random_init": True}}, False, []),
        ({"arch": ARCH, "debug": {"random_init": True}}, False, []),
        ({"name": "some/model", "arch": ARCH, "init": {}}, False, ["model.name"]),
        ({"name": "some/model", "arch": ARCH}, True, ["model.name"]),
        ({"name": "./nowhere"}, False, ["model.name"]),
        ({"name": "nowhere/a/b"}, True, ["model.name"]),
        ({"name": "some/model", "debug": {"random_init": True}}, True, ["model.debug.random_init"]),
        ({}, True, ["model.arch"]),
        ({}, False, ["model.arch", "model.init"]),
        ({"arch": ARCH}, False, ["model.init"]),
    ],
)
def test_one_thing_describes_the_model_and_one_gives_its_weights(model, resuming, keys):
    """Field case R73."""
    found = check_weights(ModelConfig.model_validate(model), resuming=resuming)
    assert [fault.key for fault in found] == keys


def test_two_models_are_told_apart():
    (fault,) = check_weights(ModelConfig(name="some/model", arch=ARCH), resuming=False)
    assert fault.message == (
        'describes two models: "some/model" here and another one in [model.arch]; give only one of them ("None" takes '
        "back what an earlier file gave)"
    )


def test_init_and_random_init_contradict_each_other():
    with pytest.raises(ValueError, match=r"leaves the weights undrawn, and \[model\.init\] draws them"):
        ModelConfig.model_validate({"name": "a", "init": {}, "debug": {"random_init": True}})


def test_the_tokenizer_is_the_models_unless_another_is_given(
    tmp_path, save_model, tiny_tokenizer, tiny_shards, run_config, faults
):
    save_model(vocab_size=384)
    data = {"type": "tokens", "paths": [str(tiny_shards)]}
    found = faults(data=data)
    assert list(found) == ["model.name"]
    assert found["model.name"].startswith(f"no tokenizer could be loaded from the folder {tmp_path / 'hf'}: ")
    given = prepare(run_config(data=data, tokenizer={"name": str(tiny_tokenizer)})).tokenizer
    assert given is not None and given.name_or_path == str(tiny_tokenizer)
    shutil.copytree(tiny_tokenizer, tmp_path / "hf", dirs_exist_ok=True)
    config = run_config(data=data)
    its_own = prepare(config).tokenizer
    assert its_own is not None and its_own.name_or_path == config.tokenizer_name == str(tmp_path / "hf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt17"}, "model_type: 'gpt17' is unknown; did you mean gpt"),
        ({"hidden_act": "gelu"}, "hidden_act: "),
        ({"num_key_value_heads": 3}, "num_key_value_heads: "),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantised weights"),
    ],
)
def test_an_architecture_that_is_not_implemented(change, message, tmp_path, save_model, faults):
    save_model()
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    found = faults()
    assert list(found) == ["model.name"] and found["model.name"].startswith(message)


def test_a_folder_without_config(tmp_path, save_model, faults):
    save_model()
    (tmp_path / "hf" / "config.json").unlink()
    assert faults()["model.name"].startswith(f"{tmp_path / 'hf' / 'config.json'} does not exist")


def test_more_layers_than_there_are(save_model, faults):
    save_model()
    assert faults(model={"debug": {"num_layers": 3}}) == {"model.debug.num_layers": "cannot keep 3 of 2 layers"}


def test_a_short_model_is_checked_against_the_whole_file(tmp_path, save_model, faults):
    save_model()
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1}))
    assert "holds 9 tensors" in faults(model={"debug": {"num_layers": 1}})["model.name"]


def test_the_run_is_named_after_the_model(tmp_path, save_model, run_config, monkeypatch):
    save_model(name="SmolLM2-135M")
    monkeypatch.chdir(tmp_path / "SmolLM2-135M")

    def name(model: str) -> str:
        config = run_config(model={"name": model}, run={})
        return str(fill_run_name(config).run.name).rpartition("--")[0]

    assert name(".") == name("../SmolLM2-135M/") == name(str(tmp_path / "SmolLM2-135M")) == "fake--SmolLM2-135M"
    assert name("Qwen/Qwen3-0.6B") == "fake--Qwen3-0.6B"
