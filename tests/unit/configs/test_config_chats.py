"""Tables of chats on the command line: the default type, what a switch drops, dates, reading back."""

import datetime
import json
from pathlib import Path

import pytest

from configs.cli import Resolved, render_error, resolve
from configs.data import FakeDataConfig, SFTDataConfig
from configs.errors import ConfigError
from configs.sft import SFTConfig

CHATS = """
max_steps = 3
[model.arch]
model_type = "llama"
[model.init]
[data]
name = ["a/chats", "b/chats"]
subsets = ["easy", "None"]
seq_len = 64
batch_size = 4
[data.loss_mask]
user = true
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("chat.toml", CHATS)


def write(name: str, text: str) -> None:
    Path(name).write_text(text, encoding="utf-8")


def sft(*argv: str) -> Resolved[SFTConfig]:
    return resolve(["@", "chat.toml", *argv])


def fault_lines(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        sft(*argv)
    return render_error(caught.value).splitlines()


def test_data_without_a_type_are_chats():
    config = sft().config
    assert isinstance(config, SFTConfig) and isinstance(config.data, SFTDataConfig)
    assert (config.data.type, config.data.name) == ("sft", ["a/chats", "b/chats"])
    assert (config.data.loss_mask.user, config.data.loss_mask.assistant, config.data.loss_mask.tool) == (
        *(True, True, False),
    )
    write("b.toml", 'max_steps = 3\n[model.arch]\nmodel_type = "llama"\n[model.init]\n[data]\nseq_len = 64\n')
    with pytest.raises(ConfigError) as caught:
        resolve(["@", "b.toml"])
    assert render_error(caught.value) == "data.name: is missing: text or a list, each text"


def test_no_subset_is_none_among_others():
    assert sft().config.data.subsets == ["easy", None]
    assert sft("--data.subsets", "None", "hard").config.data.subsets == [None, "hard"]
    assert sft("--data.subsets", '["None", "hard"]').config.data.subsets == [None, "hard"]
    assert sft("--data.subsets", "None").config.data.subsets is None


def test_chats_become_made_up_rows_by_a_flag():
    """The command of SPEC 2: `uv run sft @ chat.toml --data.type fake`."""
    resolved = sft("--data.type", "fake")
    assert isinstance(resolved.config, SFTConfig) and isinstance(resolved.config.data, FakeDataConfig)
    assert (resolved.config.data.seq_len, resolved.config.data.batch_size) == (64, 4)
    assert resolved.notes == [
        'data.type = "fake" (flag --data.type) drops what only "sft" has: data.name (chat.toml), '
        "data.subsets (chat.toml), data.loss_mask (chat.toml)"
    ]


def test_a_key_of_chats_is_no_key_of_shards():
    assert fault_lines("--data.type", "fake", "--data.packing", "none") == [
        'data.packing (flag --data.packing): is not a key of type = "fake"; it belongs to type = "sft"'
    ]
    assert fault_lines("--data.packing", "bestfit") == [
        'data.packing (flag --data.packing): expected "best_fit", "sequential" or "none", got "bestfit"; did you '
        'mean "best_fit"?'
    ]


@pytest.mark.parametrize("day", ['"2026-11-05"', "2026-11-05"])
def test_a_day_is_a_date_of_toml_or_a_text(day):
    write("day.toml", f"[renderer]\ndate = {day}\n")
    assert sft("@", "day.toml").config.renderer.date == datetime.date(2026, 11, 5)
    assert sft("--renderer.date", "2026-11-05").config.renderer.date == datetime.date(2026, 11, 5)


@pytest.mark.parametrize("day", ["20261105", '"2026-13-05"', "2026-11-05T10:00:00", '"5 November"', "[]"])
def test_what_is_no_day_is_refused(day):
    """pydantic alone would take 20261105 as seconds since 1970."""
    write("day.toml", f"[renderer]\ndate = {day}\n")
    (line,) = fault_lines("@", "day.toml")
    assert line.startswith('renderer.date (day.toml): expected a date (2026-11-05) or "None", got ')


def test_tables_of_chats_read_back_too():
    flags = (
        "--val.interval 2 --val.data.name v/chats --val.data.overflow error --model.lora.rank 4 "
        "--model.lora.modules-to-save lm_head --renderer.date 2026-11-05 --renderer.options.depth 2 "
        "--renderer.thinking false --data.probabilities 0.5 0.5"
    )
    Path("model").mkdir()
    flags += " --model.arch None --no-model.init --model.name ./model"
    config = sft(*flags.split()).config
    text = config.model_dump_json()
    assert SFTConfig.model_validate_json(text) == config
    assert json.loads(text)["renderer"]["date"] == "2026-11-05"
    assert json.loads(text)["data"]["subsets"] == ["easy", None]
    write("sft.json", text)
    assert resolve(["@", "sft.json"]).config == config


def test_rows_of_a_slip_of_the_keyboard_are_refused():
    assert fault_lines("--data.seq-len", "99999999999") == [
        "data.seq_len (flag --data.seq-len): must be at most 16777216, got 99999999999"
    ]
    assert sft("--data.seq-len", "16777216").config.data.seq_len == 1 << 24
