"""The `sft` command up to the start of workers: exit codes, what it prints, what it imports."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.sft import SFTConfig
from trainer.command import find_intruder
from trainer.errors import RunError
from trainer.launch import KilledError, WorkerError
from trainer.sft import run_sft

_TOML = """
max_steps = 5
model.init = {}
data = {type = "fake", seq_len = 8, batch_size = 4, num_rows = 10}

[model.arch]
model_type = "llama"
vocab_size = 64
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
"""


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    config = tmp_path / "run.toml"
    config.write_text(_TOML)
    return ["@", str(config), "--output-dir", str(tmp_path / "outputs"), "--run.name", "one"]


def _python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env, timeout=60, check=False)


def test_dry_run_writes_the_config_prints_the_plan_and_starts_nothing(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.launch.launch", lambda *args, **options: pytest.fail("something was started"))
    assert run_sft([*argv, "--dry-run"]) == 0
    written = tmp_path / "outputs" / "one" / "configs" / "sft.json"
    assert SFTConfig.model_validate_json(written.read_text()).dry_run is True
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == [
        "data: 10 made-up rows of 8 per epoch",
        "plan: 5 steps of 4 rows (32 tokens), 160 tokens in all, 2 epochs of 10 rows",
    ]
    assert f"dry run: config written to {written}; nothing was started" in out
    assert out[-1].endswith(f" -P -m trainer.worker {tmp_path / 'outputs' / 'one'}")
    assert sorted(path.name for path in (tmp_path / "outputs" / "one").rglob("*")) == ["configs", "sft.json"]


def test_a_run_without_a_name_gets_one(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_sft([*argv[:-2], "--dry-run"]) == 0
    (run_dir,) = (tmp_path / "outputs").iterdir()
    assert run_dir.name.startswith("fake--llama--")
    assert SFTConfig.model_validate_json((run_dir / "configs" / "sft.json").read_text()).run.name == run_dir.name


def test_a_fault_found_at_start_names_the_file_or_flag_and_leaves_nothing_behind(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sft([*argv, "--data.max-epochs", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"max_steps ({tmp_path / 'run.toml'}): 5 steps read the data 2 times")
    assert "Traceback" not in captured.err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (None, 0, ""),
        (RunError("the disk is full"), 1, "the disk is full\n"),
        (ConfigError.one("max_steps", "too few"), 2, "max_steps (flag --max-steps): too few\n"),
        (WorkerError("rank 1 failed\nValueError: boom"), 1, "rank 1 failed\nValueError: boom\n"),
        (KilledError(signal.SIGINT, "ended at once"), 130, "ended at once\n"),
        (KilledError(signal.SIGTERM, "did not stop"), 143, "did not stop\n"),
    ],
)
def test_exit_codes(
    argv: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception | None,
    code: int,
    message: str,
) -> None:
    def launch(*args: object, **options: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr("trainer.launch.launch", launch)
    argv = [*argv, "--max-steps", "4"]
    assert run_sft(argv) == code
    assert capsys.readouterr().err == message
    # The directory is free again, and not empty.
    assert run_sft(argv) == 2
    assert "one is not empty" in capsys.readouterr().err
    assert run_sft([*argv, "--clean"]) == code


def test_more_gpus_than_there_are_is_a_fault_of_the_config(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert run_sft([*argv, "--deployment.num-train-gpus", "2"]) == 2
    message = "deployment.num_train_gpus (flag --deployment.num-train-gpus): 2 asked for, 1 visible\n"
    assert capsys.readouterr().err == message


def test_a_package_of_another_project_is_named(tmp_path: Path) -> None:
    """`models` is a common name: a folder of it that comes first on the path must not be used in ours' place."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("raise RuntimeError('imported')")
    home = Path(sys.modules["trainer"].__path__[0]).parent
    result = _python("from trainer.sft import main; main()", PYTHONPATH=f"{tmp_path}{os.pathsep}{home}")
    assert result.returncode == 2
    assert result.stderr.startswith(f"the package 'models' is found at {tmp_path / 'models'}, not at {home / 'models'}")


def test_our_packages_lie_together() -> None:
    home = Path(sys.modules["trainer"].__path__[0]).parent
    assert find_intruder(home) is None
    assert "'configs' is found at" in (find_intruder(home / "elsewhere") or "")


def test_help_and_faults_of_the_config_do_not_wait_for_torch() -> None:
    code = (
        "import sys; from trainer.sft import run_sft; assert run_sft(['--max-stepz', '3']) == 2\n"
        "try: run_sft(['--help'])\n"
        "except SystemExit as end: print('help ends with', end.code)\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    result = _python(code)
    assert result.stdout.endswith("help ends with 0\n[]\n"), result.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_before_workers_are_started_ends_the_command_and_says_so(argv: list[str], name: str) -> None:
    """Field case R114: with nothing to save, it ends at once, as it would by default."""
    code = (
        "import signal, sys, threading, trainer.launch\n"
        # To this thread: what is sent to the process may be taken by another while this one runs on.
        "me = threading.get_ident()\n"
        f"trainer.launch.count_workers = lambda config: signal.pthread_kill(me, signal.{name})\n"
        f"from trainer.sft import main; sys.argv[1:] = {argv!r}; main()"
    )
    result = _python(code)
    assert result.returncode == 128 + signal.Signals[name]
    assert result.stderr == f"{name}: ended before a worker was started\n"


def test_a_signal_after_the_run_is_done_changes_nothing(argv: list[str]) -> None:
    code = (
        "import atexit, os, signal, sys, trainer.sft\n"
        "trainer.sft._start = lambda config: 0\n"
        "atexit.register(lambda: [os.kill(os.getpid(), n) for n in (15, 10, 2, 1)])\n"
        f"sys.argv[1:] = {argv!r}; trainer.sft.main()"
    )
    result = _python(code)
    assert (result.returncode, result.stderr) == (0, "")
