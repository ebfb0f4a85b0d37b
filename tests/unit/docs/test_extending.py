"""The worked example of docs/extending.md, put into a copy of the sources and trained with."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCK = re.compile(r'^```\w+ title=(\S+)(?: (before|after|replace)="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def put_in(root: Path) -> list[str]:
    """Write the page's titled blocks to where their titles say: whole files, or lines before, after or in place of the
    one line that begins as given. Gives the names of the files."""
    for name, how, anchor, text in BLOCK.findall(PAGE):
        path = root / name
        if not how:
            path.write_text(text)
            continue
        lines = path.read_text().splitlines(keepends=True)
        (place,) = [number for number, line in enumerate(lines) if line.startswith(anchor)]
        gap = "\n\n" if text.startswith("class") else ""
        stop = place + 1 if how == "replace" else place + (how == "after")
        lines[place + (how == "after") : stop] = [text + gap]
        path.write_text("".join(lines))
    return list(dict.fromkeys(name for name, *_ in BLOCK.findall(PAGE)))


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the extended sources and the page's config."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    names = put_in(folder)
    assert names == ["src/configs/data.py", "src/trainer/data/copy.py", "src/trainer/data/build.py", "copy.toml"]
    return folder


def _sft(folder: Path, arguments: list[str], module: str = "trainer.sft") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", f"from {module} import main; main()", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_trains(extended: Path) -> None:
    (command,) = re.findall(r"^uv run sft (@ copy.toml.*)$", PAGE, re.MULTILINE)
    done = _sft(extended, [*shlex.split(command), "--max-steps", "4"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data: 100,000 rows of 64, patterns of 8" in done.stdout
    assert "done: 4 steps" in done.stdout


def test_its_rows_are_shown_and_counted(extended: Path) -> None:
    """A data type that inspect-data knows nothing of."""
    arguments = ["@", "copy.toml", "--rows", "1", "--data.num-rows", "10", "--data.seq-len", "20", "--json"]
    done = _sft(extended, [*arguments, "--max-steps", "1"], "trainer.inspect.command")
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)["counts"]
    names = ("rows", "tokens", "padding_tokens", "loss_tokens", "documents")
    assert [counts[name] for name in names] == [10, 160, 40, 80, 10]
    assert counts["lengths"]["longest"] == 16 and counts["exact_lengths"]


def test_its_faults_are_shown_like_all_others(extended: Path) -> None:
    done = _sft(extended, ["@", "copy.toml", "--data.pattern-len", "40"])
    assert done.returncode == 2
    assert done.stderr == "data.pattern_len (flag --data.pattern-len): twice 40 does not fit into seq_len = 64\n"


def test_its_rows(extended: Path) -> None:
    """All targets of the copy carry loss, nothing else does, and the rest of the row is padding."""
    code = """
import numpy as np
from configs.data import CopyDataConfig
from trainer.data.build import build_source
from trainer.data.row import Rows
config = CopyDataConfig(type="copy", seq_len=15, pattern_len=3)
source = build_source(config, vocab_size=50, eos_token_id=None, tokenizer_name=None)
rows = Rows.empty(2, 15)
source.fill(1, np.array([4, 5]), rows)
for ids, labels in zip(rows.input_ids, rows.labels):
    a, b = ids[:3].tolist(), ids[6:9].tolist()
    assert ids.tolist() == a + a + b + b + [0] * 3
    no = [-100]
    assert labels.tolist() == no * 2 + a + no + no * 2 + b + no + no * 3
assert [lengths.tolist() for lengths in rows.segment_lengths] == [[6, 6, 3]] * 2 and rows.num_padding.tolist() == [3, 3]
"""
    env = os.environ | {"PYTHONPATH": str(extended / "src")}
    subprocess.run([sys.executable, "-P", "-c", code], env=env, check=True, timeout=120)
