"""Tokenizer folders that are damaged, odd or hostile: a tokenizer, or one message; no code of theirs ever runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from configs.errors import ConfigError
from trainer.tokenizer import load_tokenizer
from trainer.validation.token_bytes import token_bytes

Edit = Callable[[dict[str, Any], dict[str, Any]], None]


@pytest.fixture(scope="module", autouse=True)
def offline() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer without merges: 256 bytes and `<e>`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer") / "sound"
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<e>").save_pretrained(folder)
    return folder


@pytest.fixture
def edited(sound: Path, tmp_path: Path) -> Callable[[Edit], Path]:
    """A copy of the sound folder with `edit(tokenizer.json, tokenizer_config.json)` applied."""

    def make(edit: Edit) -> Path:
        parts = [json.loads((sound / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json")]
        edit(*parts)
        for name, part in zip(("tokenizer.json", "tokenizer_config.json"), parts, strict=True):
            (tmp_path / name).write_text(json.dumps(part))
        return tmp_path

    return make


def use(folder: Path) -> ConfigError | None:
    """What a run does with its tokenizer; the fault, if there is one."""
    try:
        tokenizer = load_tokenizer(str(folder))
        assert isinstance(len(tokenizer), int)
        assert tokenizer.eos_token_id is None or isinstance(tokenizer.eos_token_id, int)
        counts = token_bytes(tokenizer, 300)
    except ConfigError as error:
        assert [fault.key for fault in error.faults] == ["tokenizer.name"]
        return error
    assert (counts >= 0).all()
    return None


def test_the_folder_itself_is_sound(sound: Path) -> None:
    assert use(sound) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@given(data=st.data())
def test_changed_bytes(sound: Path, tmp_path: Path, name: str, data: st.DataObject) -> None:
    for file in sound.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = bytearray((sound / name).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    (tmp_path / name).write_bytes(content)
    use(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "null", "\x00" * 99, "[" * 100_000, '{"a":' * 100_000])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_that_hold_something_else(edited: Callable[[Edit], Path], name: str, content: str) -> None:
    folder = edited(lambda tokenizer, config: None)
    (folder / name).write_text(content)
    assert use(folder) is not None


def replace_decoder(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    tokenizer["decoder"] = {"type": "Sequence", "decoders": []}


def pattern_without_end(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    pattern = {"Regex": "(.+.+)+$x"}
    tokenizer["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def negative_ids(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    tokenizer["model"]["vocab"] = {letter: -i for letter, i in tokenizer["model"]["vocab"].items()}


def eos_is_a_number(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    config["eos_token"] = 5


def class_that_is_no_tokenizer(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    config["tokenizer_class"] = "GenerationConfig"


def pads_every_text(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    tokenizer["padding"] = {
        "strategy": {"Fixed": 128}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 3, "pad_type_id": 0, "pad_token": "x",
    }  # fmt: skip


@pytest.mark.parametrize(
    "edit",
    [replace_decoder, pattern_without_end, negative_ids, eos_is_a_number, class_that_is_no_tokenizer, pads_every_text],
)
def test_tokenizers_that_cannot_be_used_are_refused(edited: Callable[[Edit], Path], edit: Edit) -> None:
    assert use(edited(edit)) is not None


CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
class OwnConfig(PretrainedConfig):
    model_type = "own"
"""


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}, True),
        (
            {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["them/own--own.OwnTokenizer", None]}},
            True,
        ),
        ({"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}}, False),
        ({"tokenizer_class": "OwnTokenizer"}, False),
    ],
    ids=["needed", "in another repository", "beside a class that we have", "named only"],
)
def test_code_in_a_tokenizer_folder_never_runs(
    edited: Callable[[Edit], Path], config: dict[str, Any], refused: bool
) -> None:
    """Field case R120: no setting runs it. A tokenizer that needs it is refused, without the advice to trust it."""
    folder = edited(lambda _, own: own.update(config))
    for name in ("own.py", "tokenization_own.py", "configuration_own.py", "sitecustomize.py"):
        (folder / name).write_text(CODE)
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}))
    for name in ("vocab.pkl", "tokenizer.model", "spiece.model", "merges.txt"):
        (folder / name).write_bytes(b"cos\nsystem\n(S'touch " + str(folder / "ran").encode() + b"'\ntR.")
    error = use(folder)
    assert (error is not None) == refused
    assert error is None or "trust_remote_code" not in str(error)
    assert not (folder / "ran").exists()
