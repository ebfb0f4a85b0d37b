"""Bars and colours on a terminal, plain lines elsewhere."""

import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[3] / "src"

RUN = """
import logging, sys
from trainer.monitors.console import ConsoleMonitor
from trainer.progress import ConsoleHandler

logging.basicConfig(level="INFO", format="%(message)s", handlers=[ConsoleHandler()])
stdout = sys.stdout
console = ConsoleMonitor(interval=1, start_step=2, total_steps=4)
for step in (3, 4):
    console.log(step, {"loss/mean": 1.0})
console.log(4, {"val/[a]/bpb@1k": 1.0})
print("printed")
logging.warning("careful")
console.close()
assert sys.stdout is stdout
"""
LINES = [
    "step 3/4 | loss 1.0000",
    "step 4/4 | loss 1.0000",
    "step 4/4 | val [a] @1k | bpb 1.0000",
    "printed",
    "careful",
]


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return kept | {"PYTHONPATH": str(SOURCES), "TERM": "xterm", "COLUMNS": "100"} | extra


def on_a_terminal(**extra: str) -> str:
    """What the run writes to a terminal, escape codes included."""
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", RUN], stdout=slave, stderr=slave, env=environment(**extra))
    os.close(slave)
    output = b""
    while select.select([master], [], [], 60)[0]:
        try:
            chunk = os.read(master, 4096)
        except OSError:  # Linux reports the end of a terminal so
            break
        if not chunk:
            break
        output += chunk
    os.close(master)
    assert process.wait(60) == 0, output.decode()
    return output.decode()


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_on_a_terminal_lines_stand_above_a_bar_with_eta() -> None:
    output = on_a_terminal()
    plain = [line.strip() for line in re.split(r"[\r\n]+", without_codes(output))]
    assert [line for line in plain if line in LINES] == LINES
    bars = [line for line in plain if line.startswith("steps ")]
    assert "2/4" in bars[0]
    assert "4/4" in bars[-1]
    assert all("ETA" in line for line in bars)
    assert plain.index(LINES[-1]) < len(plain) - 1 - plain[::-1].index(bars[-1])
    # Validation is green, a warning yellow, a step's line has no colour.
    assert "\x1b[32mstep 4/4 | val [a] @1k" in output
    assert "\x1b[33mcareful" in output
    # The cursor is back before the first line: a run that is killed must not leave a terminal without one.
    assert output.rindex("\x1b[?25l") < output.index("\x1b[?25h") < output.index(LINES[0])


def test_no_color_is_obeyed() -> None:
    """NO_COLOR turns colours off; the bar stays."""
    output = on_a_terminal(NO_COLOR="1")
    assert "ETA" in output
    assert re.findall(r"\x1b\[(?:\d+;)*[349]\d(?:;\d+)*m", output) == []


def test_a_dumb_terminal_gets_plain_lines() -> None:
    assert on_a_terminal(TERM="dumb").splitlines() == LINES


def test_into_a_file_go_plain_lines() -> None:
    result = subprocess.run(
        [sys.executable, "-c", RUN], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.splitlines() == LINES
    assert result.stderr == ""
