import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.cli import resolve
from configs.reports import PlotConfig
from configs.schema import all_keys, find_slot
from configs.sft import SFTConfig
from configs.tokenize import TokenizeConfig

SRC = Path(__file__).parents[3] / "src"


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SRC), **env},
        capture_output=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def help_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "150")
    with pytest.raises(SystemExit) as caught:
        resolve(["--nonsense", "@", "gone.toml", "-h"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_every_key_is_there_with_type_default_and_doc(help_text: str):
    flat = re.sub(r"[\s│]+", " ", help_text)
    for key in all_keys(SFTConfig):
        slot = find_slot(SFTConfig, key)
        assert slot is not None
        if not slot.tables:
            assert f"--{'.'.join(key).replace('_', '-')} " in flat
    assert re.search(r"--data\.seq-len +a whole number +Tokens per row\.", help_text)
    assert re.search(r"--log\.level +\"debug\", \"info\", \"warning\" or \"error\" +Lowest level", help_text)
    for doc in ("Decay rates of the two moments.", "Folder of all runs"):
        assert doc in help_text


def test_every_table_and_variant_is_a_panel(help_text: str):
    for title in (
        "─ top level ─",
        "─ [model] ─",
        "─ [model.init] (optional, off) ─",
        '─ [data] type = "tokens" (required) ─',
        '─ [data] type = "fake" (required) ─',
        '─ [scheduler] type = "constant" (default) ─',
        '─ [scheduler] type = "linear" ─',
        "─ [monitors.wandb] (optional, off) ─",
    ):
        assert title in help_text


def test_every_key_has_a_doc():
    slots_by_key = {key: find_slot(SFTConfig, key) for key in all_keys(SFTConfig)}
    from configs.schema import TAG, slots  # the docs of unions' parts are looked up per table

    undocumented = []
    for key, slot in [((), None), *slots_by_key.items()]:
        tables = (SFTConfig,) if slot is None else slot.tables
        for table in tables:
            undocumented += [(*key, name) for name, part in slots(table).items() if name != TAG and not part.doc]
    assert undocumented == []


HELP = "from configs.cli import resolve\nresolve(['--help'])"


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}, {"TERM": "xterm-256color"}])
def test_no_colours_where_stdout_is_no_terminal(env: dict[str, str]):
    result = run_python(HELP, PYTHONIOENCODING="utf-8", **env)
    assert result.returncode == 0
    assert b"\x1b" not in result.stdout
    assert "╭─ top level".encode() in result.stdout


@pytest.mark.parametrize(("no_color", "colours"), [("", True), ("1", False)])
def test_colours_on_a_terminal_unless_no_color(no_color: str, colours: bool):
    pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", HELP],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SRC), "TERM": "xterm-256color", "NO_COLOR": no_color},
        stdout=terminal,
        stderr=subprocess.DEVNULL,
    )
    os.close(terminal)
    output = b""
    while chunk := _read(master):
        output += chunk
    assert process.wait(timeout=60) == 0
    os.close(master)
    assert (b"\x1b[" in output) is colours
    assert b"--data.seq-len" in output


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # how Linux says that the other end is closed
        return b""


def test_an_ascii_terminal_gets_ascii_boxes():
    result = run_python(HELP, PYTHONIOENCODING="ascii")
    assert result.returncode == 0
    assert b"+- top level" in result.stdout


def test_importing_configs_imports_no_heavy_package():
    modules = "cli, sft, checks, help"
    code = f"import sys\nfrom configs import {modules}\nprint(*sorted(name.split('.')[0] for name in sys.modules))"
    result = run_python(code)
    assert result.returncode == 0, result.stderr.decode()
    loaded = set(result.stdout.decode().split())
    heavy = {"torch", "transformers", "triton", "numpy", "wandb", "datatrove", "pyarrow", "models", "trainer"}
    assert {"pydantic", "tomli", "configs"} <= loaded
    assert loaded & heavy == set()


def test_resolving_loads_no_help():
    argv = ["--data.type=fake", "--model.arch.model_type=llama", "--model.init", "--max-steps=1"]
    code = f"import sys\nfrom configs.cli import resolve\nresolve({argv})\nprint('rich' in sys.modules)"
    assert run_python(code).stdout == b"False\n"


def test_the_table_in_the_example_is_one_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    lines = {}
    for config in (SFTConfig, TokenizeConfig, PlotConfig):
        with pytest.raises(SystemExit):
            resolve(["--help"], config, "prog")
        out = capsys.readouterr().out.splitlines()
        lines[config] = [line.split("  lay a file on")[0].strip() for line in out if "on top of one table" in line]
    assert lines == {
        SFTConfig: ["--model @ model.toml"],
        TokenizeConfig: ["--tokenizer @ tokenizer.toml"],
        PlotConfig: [],
    }
