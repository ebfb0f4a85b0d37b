"""`max_steps = 0`: nothing is trained, so what only training needs may be missing or wrong."""

from pathlib import Path

import pytest

from configs.cli import render_error, resolve
from configs.errors import ConfigError
from configs.sft import SFTConfig

SCORED = {
    "model.arch.model_type": "llama",
    "model.init": "{}",
    "max_steps": "0",
    "val.sets": '[{"name": "a", "path": "there"}]',
}


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()


def sft(**flags: str | None) -> SFTConfig:
    """The config of these flags (`__` is the dot) on top of SCORED; None leaves one of SCORED out."""
    given = SCORED | {key.replace("__", "."): text for key, text in flags.items()}
    return resolve([f"--{key}={text}" for key, text in given.items() if text is not None]).config


def faults(**flags: str | None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        sft(**flags)
    return render_error(caught.value).splitlines()


def test_no_data_is_needed() -> None:
    config = sft()
    assert config.only_scores
    assert config.data.type == "none"
    assert SFTConfig.model_validate_json(config.model_dump_json()) == config


def test_a_model_by_name_needs_nothing_else() -> None:
    config = sft(**{"model.arch.model_type": None, "model.init": None, "model__name": "owner/model"})
    assert config.model.takes_weights_of_name


def test_a_training_run_without_data_is_refused_as_ever() -> None:
    missing = 'data: is missing: a table with type = "sft", "tokens", "fake" or "none"'
    assert faults(max_steps="1") == [missing]
    assert faults(max_steps=None) == [missing]
    assert faults(max_steps="1", data__type="none", val__interval="1") == [
        'data.type (flag --data.type): "none" has nothing to train on; it goes with max_steps = 0, which only scores '
        "the model on [val]"
    ]


def test_something_to_score_on_is_needed() -> None:
    assert faults(**{"val.sets": None}) == [
        "val: is missing: with max_steps = 0 nothing is trained, the model is only scored on what this table names"
    ]
    assert faults(**{"val.sets": '[{"name": "a", "path": "gone"}]'}) == [
        "val.sets (flag --val.sets): gone does not exist"
    ]


def test_what_only_training_needs_may_be_wrong() -> None:
    assert sft(
        data__type="tokens",
        data__paths='["gone"]',
        data__batch_size="6",
        deployment__num_train_gpus="4",
        scheduler__type="linear",
        scheduler__warmup_steps="1000",
    ).only_scores


def test_the_weights_are_still_those_of_one_source() -> None:
    assert [fault.split(":")[0] for fault in faults(**{"model.init": None})] == ["model.init"]
    assert [fault.split(" ")[0] for fault in faults(run__name="one", clean="true", resume="{}")] == ["clean"]


def test_any_step_of_a_run_can_be_scored() -> None:
    """Its number is past the end of a run of 0 steps, and no counters go on from it."""
    config = sft(run__name="one", resume__step="500", ckpt__skip_progress="true")
    assert config.resume is not None
    assert config.resume.step == 500


def test_rows_are_as_long_as_what_is_scored() -> None:
    """A model that knows 64 positions can be scored in windows of 64, whatever [data] would have trained it on."""
    assert sft(data__type="fake", data__seq_len="4096", val__seq_lens="[32, 64]").longest_row == 64
    assert sft(max_steps="5", data__type="fake", data__seq_len="4096", val__interval="1").longest_row == 4096
