"""One run of the real command with secrets in its environment, and all that it leaves behind."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "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",
    "DB_PASSWORD": "correct-horse-battery",
    "PRIVATE_THING": "kept-out-of-every-file",
}
TOML = """
max_steps = 2
data = {type = "fake", seq_len = 8, batch_size = 2, num_rows = 10}
ckpt = {interval = 1}

[model]
init = {}
[model.arch]
model_type = "llama"
vocab_size = 64
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2

[monitors.wandb]
mode = "offline"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "run.toml").write_text(TOML)
    command = [sys.executable, "-c", "from trainer.sft import main; main()", "@", "run.toml", "--run.name", "one"]
    env = os.environ | SECRETS | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    old = os.umask(0o022)
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    finally:
        os.umask(old)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "outputs" / "one", done.stdout + done.stderr


def test_no_secret_is_written_or_shown(run: tuple[Path, str]) -> None:
    """SPEC 11: configs, logs, metrics, checkpoints and wandb's files, byte for byte."""
    run_dir, shown = run
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"sft.json", "rank_0.log", "metrics.jsonl", "state.json"}
    assert any(path.suffix == ".wandb" for path in files)
    for name, secret in SECRETS.items():
        assert secret not in shown, name
        assert [path for path in files if secret.encode() in path.read_bytes()] == [], name


def test_nobody_else_may_write_what_is_written(run: tuple[Path, str]) -> None:
    """Under the usual umask: others read at most."""
    run_dir, _ = run
    paths = [run_dir, *(path for path in run_dir.rglob("*") if not path.is_symlink())]
    assert len(paths) > 10
    assert [path for path in paths if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)] == []
    assert [path for path in paths if path.is_file() and path.stat().st_mode & 0o111] == []
