"""A data folder with everything in it that some loader would run or follow."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from configs.data import SFTDataConfig, TokensDataConfig
from configs.errors import ConfigError
from configs.renderer import RendererConfig
from trainer.data.build import build_source
from trainer.data.chat.build import ChatTools, build_chats
from trainer.data.row import Rows, untracked
from trainer.tokenizer import load_tokenizer

DOCUMENTS = [40, 41, 0] * 20


class Touch:
    """Unpickling makes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, int]]:
        return os.mkdir, (str(self.path),)


def plant(folder: Path) -> None:
    """Files that would make `ran` beside the folder."""
    ran = folder.parent / "ran"
    pickled = pickle.dumps(Touch(ran))
    for name in ("data.pkl", "00000.pt", "pytorch_model.bin", "state.pickle", "00001.npy", ".metadata", "cache.arrow"):
        (folder / name).write_bytes(pickled)
    code = f"import os\nos.mkdir({str(ran)!r})\n"
    for name in ("data.py", "dataset.py", "__init__.py", "conftest.py", "sitecustomize.py", "numpy.py", "json.py"):
        (folder / name).write_text(code)
    (folder / "dataset_infos.json").write_text('{"builder_name": "data", "download": "file:///etc/passwd"}')
    (folder / "models.pth").write_text(code)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound shard among planted files."""
    folder = tmp_path / "data"
    folder.mkdir()
    shard = folder / "00000.ds"
    np.array(DOCUMENTS, "<u2").tofile(shard)
    np.arange(3, 61, 3).astype("<u8").tofile(f"{shard}.index")
    Path(f"{shard}.metadata").write_text("tiny|2\n60\n")
    plant(folder)
    return folder


@pytest.fixture(params=["lines", "saved"])
def chats(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A conversation among planted files: in a file, or in a folder saved by `datasets`."""
    row = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    folder = tmp_path / "data"
    if request.param == "saved":
        Dataset.from_list([row]).save_to_disk(folder)
    else:
        folder.mkdir()
        (folder / "chats.jsonl").write_text(json.dumps(row) + "\n")
    plant(folder)
    return folder


def build(folder: Path) -> Any:
    config = TokensDataConfig(type="tokens", paths=[folder], seq_len=10)
    return build_source(config, vocab_size=50, eos_token_id=0, tokenizer_name="tiny")


def test_planted_files_are_not_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case R120, for data: nothing in the folder runs, from there or from beside it."""
    monkeypatch.chdir(folder)
    source = build(folder)
    rows = Rows.empty(source.num_rows, 10)
    source.fill(0, np.arange(source.num_rows), rows)
    assert set(rows.input_ids.flatten().tolist()) == {0, 40, 41}
    assert not (folder.parent / "ran").exists()


def test_planted_files_beside_chats_are_not_opened(
    chats: Path, byte_chat_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case R120, for conversations."""
    monkeypatch.chdir(chats)
    tools = ChatTools(
        tokenizer=load_tokenizer(str(byte_chat_tokenizer)),
        renderer=RendererConfig(),
        cache_dir=chats.parent / "cache",
        track=untracked,
    )
    source = build_chats(SFTDataConfig(name=str(chats), seq_len=128), tools, vocab_size=300)
    assert (source.counts.rows, source.counts.loss_tokens) == (1, 2)
    assert not (chats.parent / "ran").exists()


@pytest.mark.parametrize("ending", ["", ".index", ".metadata", ".loss"])
def test_a_pickle_in_place_of_a_shards_file_is_refused(folder: Path, ending: str) -> None:
    Path(f"{folder / '00000.ds'}{ending}").write_bytes(pickle.dumps(Touch(folder.parent / "ran")))
    with pytest.raises(ConfigError, match=r"00000\.ds"):
        build(folder)
    assert not (folder.parent / "ran").exists()


def test_the_pickle_would_have_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Touch(tmp_path / "ran")))
    assert (tmp_path / "ran").is_dir()
