"""A saver killed with SIGKILL never leaves a folder that looks whole and is not."""

import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("checkpoint_kill_worker.py")


def test_kill(tmp_path: Path) -> None:
    """Field case R66: a crash in a save leaves the checkpoint before it, or the new one, never a broken one."""
    done = subprocess.run(
        [sys.executable, str(WORKER), str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    at_calls, at_times = map(int, done.stdout.split())
    assert at_calls > 30
    assert at_times == 10
