"""Paths and names that lead elsewhere, break the terminal or are no paths: one message, and nothing outside touched."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.sft import run_sft

TOML = """
max_steps = 2
model.init = {}

[model.arch]
model_type = "llama"
vocab_size = 64
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
"""
TOKENS = ["--data.type=tokens", "--data.seq-len=8", "--data.batch-size=2"]
FAKE = ["--data.type=fake", "--data.seq-len=8", "--data.batch-size=2"]
PATHS = {
    "output_dir": [*FAKE, "--run.name=one"],
    "model.name": [*FAKE, "--model.arch=None", "--model.init=None"],
    "run.name": FAKE,
    "resume.dir": [*FAKE, "--run.name=one"],
    "data.paths": TOKENS,
    "tokenizer.name": FAKE,
    "val.data_dir": [*FAKE, "--val.sets=a", "--val.interval=1"],
    "val.sets": [*FAKE, "--val.data-dir=.", "--val.interval=1"],
}
STRANGE = [
    "\x00", "a\x00b", "\x1b[2J\x1b]0;x\x07", "a\nb", "\r", "x" * 300, "/".join("x" * 3000), "", " ", ".", "..", "/",
    "//", "../../..", "/dev/null", "/dev/null/x", "/proc/self/mem", "loop", "loop/x", "file", "file/x", "nowhere", "~",
    "$HOME", "\u202e", "\u200d", "é" * 100, "%s", "{}", "[red]", "a:b", "*", "None", "null", "-", "--", "https://host/a",
]  # fmt: skip
TEXTS = st.sampled_from(STRANGE) | st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def no_hub(*args: object, **options: object) -> None:
    raise OSError("no hub in a test")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_hub)
    work = tmp_path / "a" / "b" / "work"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    Path("run.toml").write_text(TOML)
    Path("loop").symlink_to("loop")
    Path("nowhere").symlink_to("gone")
    Path("file").touch()
    return work


def check(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and output of a dry run, which may be refused and must not break."""
    code = run_sft(["@", "run.toml", *argv, "--dry-run"])
    out, err = capsys.readouterr()
    assert code in (0, 1, 2)
    assert (code == 0) == (err == "") or "transformers" in err
    assert (out + err).replace("\n", "").isprintable()
    assert "Traceback" not in out + err
    return code, out + err


@pytest.mark.parametrize("key", [key for key in PATHS if key != "output_dir"])
@settings(max_examples=settings.default.max_examples // 3)
@given(text=TEXTS)
def test_any_text_as_a_path(folder: Path, capsys: pytest.CaptureFixture[str], key: str, text: str) -> None:
    check([*PATHS[key], f"--{key}={text}"], capsys)


@pytest.mark.parametrize("text", [text for text in STRANGE if not text.startswith("/")])
def test_strange_output_dirs(folder: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    check([*PATHS["output_dir"], f"--output_dir={text}"], capsys)


@pytest.mark.parametrize("key", ["run.name", "val.sets"])
@pytest.mark.parametrize(
    "text",
    ["..", ".", "a/b", "/tmp", "../a", "", "-a", ".a", "a\nb", "a\x1b[0m", "a b", "a\\b", "a:b", "é\u0301/", "a@2k"],
)
def test_names_are_no_paths(folder: Path, capsys: pytest.CaptureFixture[str], key: str, text: str) -> None:
    """A run's name is a folder, a set's name is part of `val/<set>/<metric>@<length>`: no slash, no control."""
    code, shown = check([*PATHS[key], f"--{key}={text}"], capsys)
    assert code == 2 and key in shown
